// What one rank holds of a sharded parameter or gradient, as plain numbers. Operators on slices give slices; a test may look.
#pragma once

#include <torch/torch.h>

namespace fsdp::testing {

// (numel), a copy. Also a way for users who know that they see one rank only.
inline torch::Tensor rank_part(const torch::Tensor& slice) {
  return torch::from_blob(slice.data_ptr(), {slice.numel()}, torch::dtype(slice.scalar_type())).clone();
}

}  // namespace fsdp::testing
