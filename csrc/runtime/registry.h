// Which tensors and storages belong to which sharded model.
//
// The only global of the runtime: the access hook is registered with the dispatcher once for the process, and all it is given is
// a tensor. Entries are made when a model is wrapped and removed when its wrapper is destroyed; the model holds every object
// whose address is a key, so an address always means the same object.
//
// Thread safety: any thread. A found entry stays valid while its model lives.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fsdp {

class ShardedModel;
struct FlatGroup;
struct ShardedParameter;
struct Unit;

struct TrackedTensor {
  enum class Kind {
    PARAMETER,  // the user's handle itself
    UNSHARDED,  // a tensor on an unsharded buffer: an alias or view of parameters
    SHARD,      // a tensor on a flat shard
    GRADIENT,   // a tensor on a shard's gradient
  };
  Kind kind;
  ShardedModel* model;
  Unit* unit;
  FlatGroup* group;
  ShardedParameter* parameter;  // PARAMETER only
};

namespace registry {

void add(ShardedParameter& parameter, ShardedModel& model, Unit& unit);
void add(const at::Tensor& flat, TrackedTensor::Kind kind, ShardedModel& model, Unit& unit, FlatGroup& group);
void remove_all(const ShardedModel& model);

std::optional<TrackedTensor> find(const at::Tensor& tensor);
bool is_sharded(const at::Tensor& handle);  // already a parameter of some sharded model

}  // namespace registry
}  // namespace fsdp
