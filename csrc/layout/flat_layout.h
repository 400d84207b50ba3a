// Where the parameters of one flat group lie, in integers only.
//
// Vocabulary: a flat group lays its parameters one behind the other into one flat buffer. N ranks each own a contiguous 1/N of
// it, the shard; `shard_numel` is its length, the same on all ranks. All lengths and offsets count elements.
//
//   unsharded buffer (N·shard_numel):   | p0 ..pad| p1 ....pad| p2 .|....       pad |        parameters may cross shard borders
//   gradient buffer (N intervals):      | shard 0 | counts 0 | shard 1 | counts 1 | ...
//
// The gradient buffer repeats the shards with `counts_numel` numbers behind each: slot k says on how many ranks parameter k had
// a gradient. A reduce-scatter thus sums gradients and counts at once, and every rank learns all counts.
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

// The part of a parameter that one rank's shard holds; length 0 when they do not meet.
struct ShardSlice {
  int64_t begin_in_parameter = 0;
  int64_t begin_in_shard = 0;  // 0 ≤ begin_in_shard ≤ shard_numel, also for length 0
  int64_t length = 0;
};

// A run of a parameter's elements that is contiguous in the gradient buffer.
struct GradientRun {
  int64_t begin_in_parameter = 0;
  int64_t begin_in_gradient = 0;
  int64_t length = 0;
};

class FlatLayout {
 public:
  // numels: elements of each parameter, each ≥ 0. alignment: every offset, shard_numel and counts_numel is a multiple of it.
  // Throws c10::Error on a negative size, world_size < 1, alignment < 1, or when the total overflows.
  FlatLayout(std::vector<int64_t> numels, int64_t alignment, int world_size);

  int world_size() const { return world_size_; }
  int64_t parameters() const { return static_cast<int64_t>(numels_.size()); }
  int64_t numel(int64_t parameter) const { return numels_[parameter]; }
  int64_t offset(int64_t parameter) const { return offsets_[parameter]; }  // in the unsharded buffer
  int64_t shard_numel() const { return shard_numel_; }
  int64_t unsharded_numel() const { return shard_numel_ * world_size_; }
  int64_t counts_numel() const { return counts_numel_; }
  int64_t gradient_shard_numel() const { return shard_numel_ + counts_numel_; }  // one rank's interval of the gradient buffer
  int64_t gradient_numel() const { return gradient_shard_numel() * world_size_; }

  ShardSlice slice(int64_t parameter, int rank) const;
  std::vector<GradientRun> gradient_runs(int64_t parameter) const;

 private:
  int world_size_;
  std::vector<int64_t> numels_;
  std::vector<int64_t> offsets_;
  int64_t shard_numel_ = 0;
  int64_t counts_numel_ = 0;
};

// Elements that fill a multiple of 16 bytes in every one of these element sizes: ring collectives and vector kernels fall off a
// cliff, or take other code paths with other rounding, at lesser alignments.
int64_t alignment_in_elements(const std::vector<int64_t>& element_sizes);

}  // namespace fsdp
