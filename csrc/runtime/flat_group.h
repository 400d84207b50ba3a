// The memory of one flat group, and what the user's parameter handles hold.
//
// Handle states (design note: docs/design/handle_states.md). The TensorImpl the user's model, optimizer and graph share is never
// replaced; its content is switched:
//   SHARDED    1-D slice of `shard` (this rank's part, possibly empty), in the group's dtype
//   COMPUTING  the full shape, storage = `unsharded`, in the compute dtype; the memory behind it may be absent
// A replicated parameter holds the full shape in `shard` in both, is no concern of the access hook, and its `.grad` has the full shape.
// The memory of `unsharded` is a second, independent thing: see BufferState in unit.h.
//
// Shapes: S = layout.shard_numel(), N = world size (1 where replicated), G = layout.gradient_shard_numel().
#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/plan.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "layout/flat_layout.h"

namespace fsdp {

class GradientSink;
class ShardedModel;
struct FlatGroup;

struct ShardedParameter {
  std::string name;
  FlatGroup* group = nullptr;
  int64_t index = 0;  // in the group
  at::Tensor handle;  // the user's own tensor object
  std::vector<int64_t> full_shape;
  std::vector<int64_t> full_strides;
  std::vector<int64_t> memory_order;  // dims by falling stride where the layout is not the usual one; empty otherwise

  at::Tensor full;                     // what the handle holds when COMPUTING
  at::Tensor slice;                    // what the handle holds when SHARDED
  at::Tensor gradient_slice;           // what .grad holds
  std::shared_ptr<GradientSink> sink;  // null for dtypes that have no gradients

  // What kernels get instead of the handle, by grad mode; see ShardedModel::alias_of.
  struct Alias {
    at::Tensor tensor;
    uint32_t version = 0;
  };
  std::array<Alias, 2> aliases;

  // The elements in the order they have in memory, 1-D; `tensor` has the full shape. Copies only where it must.
  at::Tensor in_memory_order(const at::Tensor& tensor) const;
};

struct FlatGroup {
  // Made with shard and shapes, its unsharded buffer absent, the handles untouched. unit_title: "unit 'blocks.0'" or "the root unit".
  FlatGroup(std::string unit_title, const PlannedGroup& planned, const std::vector<at::Tensor>& tensors, int world_size, int rank);

  std::string unit_title;
  FlatLayout layout;
  c10::ScalarType dtype;
  c10::ScalarType compute_dtype;
  c10::ScalarType reduce_dtype;
  const bool keeps_master, kept_wide, replicated;  // as planned
  int rank;                                        // the place of its shard in the layout: 0 where replicated
  std::vector<ShardedParameter> parameters;        // never resized after construction: others point into it

  at::Tensor shard;           // (S) dtype
  at::Tensor shard_gradient;  // (S) dtype; without memory until the first reduction
  at::Tensor unsharded;       // (N·S) compute dtype; its storage is emptied and refilled, its version counter is nobody else's

  int64_t unsharded_bytes() const;
  // One rank that computes in the shard's own dtype: the unsharded buffer is the shard's memory, nothing is gathered or copied.
  bool is_whole() const { return layout.world_size() == 1 && dtype == compute_dtype; }
  int64_t shard_gradient_bytes() const;  // 0 before the first reduction

  // Fills `shard` from the handles' plain values. `flat` (N·S, dtype), when given, holds all ranks' values instead.
  void fill_shard_from_handles();
  void fill_shard_from(const at::Tensor& flat);
  at::Tensor plain(const ShardedParameter& parameter, const at::Tensor& flat) const;  // out of `flat` (N·S), in memory of its own
  at::Tensor flatten_handles() const;                                                 // (N·S) dtype, padding zero

  // The one place where a handle's content changes. REQUIRES: the access hook is off (WithoutAccessHook).
  void hold_full();
  void hold_slices();

  // Memory of the unsharded buffer: comes, may be exchanged for other memory with the same content, and goes.
  void hold_memory(at::DataPtr memory);
  void borrow_shard();  // the shard's own memory. REQUIRES: is_whole()
  void release_memory();
  at::Tensor flat_on(at::DataPtr memory) const;  // (N·S) compute dtype, a storage of its own on that memory
  void allocate_shard_gradient();                // zeros; does nothing the second time

  // The parameters that a tensor on the unsharded buffer can reach.
  std::vector<ShardedParameter*> parameters_under(const at::Tensor& view);
  // Copies this rank's part of a gathered parameter back into the shard. REQUIRES: resident.
  void keep_written(ShardedParameter& parameter);
  // The same for all elements that differ from what was gathered; those that do not keep the master's precision. REQUIRES: resident.
  void keep_changes();
  at::Tensor own_part_of(const at::Tensor& flat) const;  // (S) of (N·S)

 private:
  void hold(at::Tensor ShardedParameter::*data);
};

}  // namespace fsdp
