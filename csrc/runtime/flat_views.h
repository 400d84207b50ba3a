// Flat-group views: what optimizers and saving see of a sharded model. Memory and names; when units are gathered and freed stays below.
//
// Thread safety: as the model's, one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

class ShardedModel;
struct FlatGroup;
struct Unit;
namespace comm {
class Collectives;
}

struct ParameterView {
  std::string name;
  at::Tensor handle;  // the user's tensor
  int64_t begin = 0;  // of this rank's slice, in the shard
  int64_t length = 0;
  int64_t begin_in_parameter = 0;     // the same, in the parameter's memory order
  std::vector<int64_t> shape;         // of the whole parameter
  std::vector<int64_t> memory_order;  // dims by falling stride where the layout is not the usual one; empty otherwise

  bool has_gradient() const { return handle.grad().defined(); }  // alike on all ranks, also where the slice is empty
  // Of a tensor of the whole shape the part that belongs into this rank's slice, 1-D.
  at::Tensor slice_of(const at::Tensor& whole) const;
};

struct FlatGroupView {
  std::string unit_title;                 // "unit 'blocks.0'" or "the root unit"
  bool replicated = false;                // whole on every rank: the shard is all of it, alike on all ranks
  at::Tensor shard;                       // (S)
  at::Tensor gradient;                    // (S), in the shard's dtype; holds what it should only where has_gradient()
  std::vector<ParameterView> parameters;  // in the order of the shard
};

// Neighbouring slices, and the padding between them: one stretch of the shard.
struct Stretch {
  int64_t begin = 0;
  int64_t length = 0;
  size_t first = 0;  // parameter
};

// The stretches over those parameters that `chosen` returns true for; empty slices belong to none. Neighbours become one where
// joins(left, right) allows it, and padding is zero in shards and gradients, so that element-wise work may run over it.
std::vector<Stretch> stretches_of(const FlatGroupView& group, const std::function<bool(size_t)>& chosen,
                                  const std::function<bool(size_t, size_t)>& joins = {});

class FlatViews {
 public:
  explicit FlatViews(std::shared_ptr<ShardedModel> model);

  int rank() const;
  comm::Collectives& collectives() const;
  const std::vector<FlatGroupView>& groups() const { return groups_; }

  // Before gradients or shards are read or written: what the user assigned to parameters and to .grad moves into the flat memory. Throws
  // c10::Error, before anything changes, while the model is running, after unwrap(), and where what was assigned does not fit.
  void settle(const char* who);

  // After shards were written: a backward through what parameters were before raises LibTorch's usual error, and what is gathered of
  // their unit is freed. To be called alike on all ranks, so also for empty slices.
  void were_written(size_t group, const std::vector<size_t>& parameters);

  // The group's parameters with their whole shapes, in memory of their own. All ranks must call unless the group is replicated: all ranks'
  // parts of `flat`, which is the group's shard or as large, are gathered.
  std::vector<at::Tensor> whole(size_t group, const at::Tensor& flat, const char* purpose);

  // What this rank's check of its gradients has found: (1) float, above 0 for inf or NaN. The next clipping sends it along.
  void found_non_finite(at::Tensor found);
  // Whether any rank has found some. All ranks must call: one all-reduce, unless clipping has brought the answer.
  bool any_found_non_finite(const char* purpose);

 private:
  std::shared_ptr<ShardedModel> model_;
  std::vector<FlatGroupView> groups_;
  std::vector<Unit*> units_;               // by group
  std::vector<const FlatGroup*> sources_;  // by group
};

}  // namespace fsdp
