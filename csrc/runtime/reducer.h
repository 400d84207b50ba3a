// From whole gradients to the shards' gradients.
//
// During a backward, each finished gradient is copied, divided by the world size, into its group's flat gradient buffer. When the
// last one that this backward will bring has arrived, the group's reduce-scatter starts; its result is added to the shard's
// gradient, or replaces it where .grad is undefined (after zero_grad). At most one reduction is in flight: a second waits for
// the first, which bounds the memory.
//
// The counts behind each interval (flat_layout.h) tell every rank on how many ranks a parameter had a gradient, so .grad becomes
// defined on all ranks or on none.
//
// A backward that does not sync leaves whole gradients where they are, and the next one that does reduces them with its own.
// Replicated groups are all-reduced instead, and their gradients have the full shape.
//
// Thread safety: the model's lock is held by the caller.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "comm/buffer_pool.h"
#include "runtime/counters.h"
#include "runtime/unit.h"

namespace fsdp {

// For a .grad that the user put there: throws where it is no slice of the parameter's; makes it the flat gradient's content.
void check_assigned_gradient(const ShardedParameter& parameter, int rank);
void take_over_assigned_gradient(ShardedParameter& parameter);

class Reducer {
 public:
  Reducer(CountedCollectives& collectives, std::vector<std::unique_ptr<Unit>>& units);

  void add(FlatGroup& group);  // behind those that are there. REQUIRES: no backward is under way

  // Reads from the current graph task which gradients it will bring. REQUIRES: called inside the graph task.
  void begin_backward(bool syncs);
  void receive(ShardedParameter& parameter, const at::Tensor& gradient);  // undefined: this rank has none
  void finish_backward();            // reduces what is incomplete, in plan order, waits, and defines .grad
  void abandon_backward() noexcept;  // drops what is not reduced yet, also what earlier backwards left

  void set_divisor(double divisor) { divisor_ = divisor; }
  void drop_held();  // REQUIRES: no backward is under way

  int64_t peak_buffer_bytes() const { return peak_buffer_bytes_; }
  int64_t allocations() const { return pool_.allocations(); }

 private:
  struct GroupGradient {
    FlatGroup* group = nullptr;
    at::Tensor flat;        // (N·G) reduce dtype; undefined while nothing has arrived
    std::vector<bool> has;  // by parameter
    int64_t arrived = 0;
    int64_t expected = 0;
    std::vector<bool> defines;  // by parameter: .grad is to be defined at the end
  };

  GroupGradient& of(const FlatGroup& group);
  void start(GroupGradient& gradient);
  void finish_in_flight();
  void add_to_shard(GroupGradient& gradient, ShardedParameter& parameter, const at::Tensor& reduced);

  CountedCollectives& collectives_;
  comm::BufferPool pool_;
  std::vector<GroupGradient> gradients_;  // in plan order
  double divisor_;                        // of the sum over the ranks
  bool syncs_ = true;
  GroupGradient* in_flight_ = nullptr;
  comm::Pending pending_;
  int64_t buffer_bytes_ = 0;
  int64_t peak_buffer_bytes_ = 0;
};

}  // namespace fsdp
