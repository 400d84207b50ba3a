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
    PARAMETER,   // the user's handle itself
    UNSHARDED,   // a tensor on an unsharded buffer: an alias or view of parameters
    SHARD,       // a tensor on a flat shard
    GRADIENT,    // a tensor on a shard's gradient
    REPLICATED,  // the user's handle of a parameter that is whole on every rank
    DERIVED,     // a tensor with memory of its own, computed from slices
  };
  Kind kind;
  ShardedModel* model;
  Unit* unit;
  FlatGroup* group;
  ShardedParameter*
      parameter;  // never of UNSHARDED; of SHARD and GRADIENT where known; of DERIVED the one it was computed from, or one of them
};

namespace registry {

void add(ShardedParameter& parameter, ShardedModel& model, Unit& unit);
void add(const at::Tensor& flat, TrackedTensor::Kind kind, ShardedModel& model, Unit& unit, FlatGroup& group);
void remove_all(const ShardedModel& model);

// Gives `tensor` the access key and the name of `origin`, where it has none; unless it lies in tracked memory it is DERIVED then. That
// belongs to the tensor object and its copies (detach, data, set_data), not to an address, and ends with remove_all.
void mark_derived(const at::Tensor& tensor, const ShardedParameter& origin);

// The access key alone: operators on `tensor` and its views pass the access hook from now on.
void add_access_key(const at::Tensor& tensor);

std::optional<TrackedTensor> find(const at::Tensor& tensor);
bool is_sharded(const at::Tensor& handle);  // already a parameter of some sharded model, replicated ones too

}  // namespace registry
}  // namespace fsdp
