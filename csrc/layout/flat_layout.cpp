#include "layout/flat_layout.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fsdp {
namespace {

constexpr int64_t kAlignmentBytes = 16;
constexpr int64_t kLargest = std::numeric_limits<int64_t>::max() / 2;  // leaves room for every sum below

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

}  // namespace

FlatLayout::FlatLayout(std::vector<int64_t> numels, int64_t alignment, int world_size)
    : world_size_(world_size), numels_(std::move(numels)) {
  TORCH_CHECK(world_size >= 1, "flat layout: world size must be at least 1, got ", world_size);
  TORCH_CHECK(alignment >= 1, "flat layout: alignment must be at least 1 element, got ", alignment);
  offsets_.reserve(numels_.size());
  int64_t end = 0;
  for (const int64_t numel : numels_) {
    TORCH_CHECK(numel >= 0, "flat layout: a parameter cannot have ", numel, " elements");
    TORCH_CHECK(numel <= kLargest - end - alignment * (world_size + 1), "flat layout: more than 2^62 elements in one group");
    offsets_.push_back(end);
    end = round_up(end + numel, alignment);
  }
  shard_numel_ = round_up((end + world_size - 1) / world_size, alignment);
  counts_numel_ = round_up(parameters(), alignment);
}

ShardSlice FlatLayout::slice(int64_t parameter, int rank) const {
  const int64_t shard_begin = rank * shard_numel_, shard_end = shard_begin + shard_numel_;
  const int64_t begin = offset(parameter), end = begin + numel(parameter);
  const int64_t first = std::clamp(begin, shard_begin, shard_end), last = std::clamp(end, shard_begin, shard_end);
  const int64_t length = last - first;
  return {length ? first - begin : 0, first - shard_begin, length};
}

std::vector<GradientRun> FlatLayout::gradient_runs(int64_t parameter) const {
  std::vector<GradientRun> runs;
  if (numel(parameter) == 0) return runs;
  const int first = static_cast<int>(offset(parameter) / shard_numel_);
  for (int rank = first; rank < world_size_; ++rank) {
    const ShardSlice part = slice(parameter, rank);
    if (part.length == 0) break;
    runs.push_back({part.begin_in_parameter, rank * gradient_shard_numel() + part.begin_in_shard, part.length});
  }
  return runs;
}

int64_t alignment_in_elements(const std::vector<int64_t>& element_sizes) {
  int64_t elements = 1;
  for (const int64_t size : element_sizes) elements = std::max(elements, kAlignmentBytes / std::min(size, kAlignmentBytes));
  return elements;
}

}  // namespace fsdp
