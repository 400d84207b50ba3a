// The memory of one model's unsharded buffers: a block as large as they may be together, taken once.
//
// Buffers of different sizes come and go, so a free stretch may be too short although enough is free. Buffers that nothing points
// into at the moment are then moved together: kernels reach them through storages only, which are told of the new place.
//
// Thread safety: the model's lock is held by the caller.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <vector>

#include "runtime/unit.h"

namespace fsdp {

class Arena {
 public:
  // bytes: of all buffers that are placed at the same time, each rounded up to kAlignment. Memory is taken with the first one.
  explicit Arena(int64_t bytes) : bytes_(bytes) {}

  static constexpr int64_t kAlignment = 64;  // of a place; a cache line
  static int64_t rounded_up(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

  // Gives the group's unsharded buffer memory, and returns a 1-D tensor on that memory, in the compute dtype, which keeps it alive by
  // itself. Undefined where no stretch is long enough.
  at::Tensor place(Unit& unit, FlatGroup& group);
  at::Tensor place_outside(FlatGroup& group);  // the same, in memory of its own
  void remove(FlatGroup& group);

  int64_t allocations() const { return allocations_; }

 private:
  struct Place {
    Unit* unit;
    FlatGroup* group;
    int64_t begin;
    int64_t bytes;
  };
  using Memory = std::shared_ptr<at::DataPtr>;  // buffers hold it, since a graph may outlive the model

  Memory allocate(int64_t bytes);
  std::vector<Place>::iterator find_gap(int64_t bytes, int64_t& begin);
  void move_together();

  const int64_t bytes_;
  Memory memory_;
  std::vector<Place> places_;  // by rising begin
  int64_t allocations_ = 0;
};

}  // namespace fsdp
