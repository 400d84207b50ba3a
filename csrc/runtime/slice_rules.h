// What may be done with a sharded parameter or gradient outside the wrapper.
//
// There it holds this rank's slice. Slices take part in arithmetic among tensors of their own size and scalars, with results of
// that size: exactly what optimizers do. Everything else would silently compute with a part of the parameter, and is refused.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include "runtime/registry.h"

namespace fsdp {

struct SliceUse {
  TrackedTensor tracked;
  const void* identity;  // of the TensorImpl, which may be gone when results are checked
  int64_t storage_offset;
  int64_t numel;
  bool requires_grad;
};

// Throws c10::Error that names the parameter, the operator and what to call instead. REQUIRES: `slices` not empty.
void check_slice_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const std::vector<SliceUse>& slices);
void check_slice_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const std::vector<SliceUse>& slices);

}  // namespace fsdp
