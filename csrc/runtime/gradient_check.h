// Whether the gradients held inf or NaN when a scaler looked at them: each rank finds out about its own part, and the next reduction of
// clipping, or one of its own, brings all ranks' answers together.
#pragma once

#include <ATen/core/Tensor.h>

namespace fsdp {

struct GradientCheck {
  at::Tensor found;     // (1) float, above 0: this rank has found some, or any rank once `agreed`. Undefined: nobody has looked
  bool agreed = false;  // alike on all ranks
};

}  // namespace fsdp
