// Flat buffers that are needed again and again, in sizes that differ: memory is taken once and handed round.
//
// Thread safety: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace fsdp::comm {

class BufferPool {
 public:
  // (numel) dtype on the CPU; its content is what the last user left.
  at::Tensor take(int64_t numel, c10::ScalarType dtype);
  // REQUIRES: taken here, and nobody reads or writes it any more. One that is never given back is freed with its last tensor.
  void give_back(const at::Tensor& buffer);

  int64_t allocations() const { return allocations_; }

 private:
  std::vector<c10::Storage> free_;
  int64_t allocations_ = 0;
};

}  // namespace fsdp::comm
