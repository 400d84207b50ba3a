#include "comm/buffer_pool.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

namespace fsdp::comm {

at::Tensor BufferPool::take(int64_t numel, c10::ScalarType dtype) {
  const auto bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  // The smallest that is large enough.
  std::sort(free_.begin(), free_.end(), [](const auto& a, const auto& b) { return a.nbytes() < b.nbytes(); });
  const auto fitting = std::find_if(free_.begin(), free_.end(), [&](const auto& storage) { return storage.nbytes() >= bytes; });
  if (fitting != free_.end()) {
    auto buffer = at::empty({0}, at::dtype(dtype)).set_(*fitting, 0, {numel}, {1});
    free_.erase(fitting);
    return buffer;
  }
  if (!free_.empty()) free_.pop_back();  // the new one replaces the largest, so that sizes settle after a step or two
  ++allocations_;
  return at::zeros({numel}, at::dtype(dtype));
}

void BufferPool::give_back(const at::Tensor& buffer) { free_.push_back(buffer.storage()); }

}  // namespace fsdp::comm
