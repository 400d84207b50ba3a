// What may be done with a sharded parameter or gradient outside the wrapper, and with what is computed from them.
//
// There they hold this rank's slice. Slices take part in arithmetic among tensors of their own size and scalars, with results of
// that size: exactly what optimizers do. The results are slices again, so the rules hold for them too, and no chain of operators ends in
// a number of one rank. (On one rank a slice is the whole parameter in one dimension: only shapes are checked.) Everything else would
// silently compute with a part of the parameter, and is refused.
#pragma once

#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>
#include <c10/util/ArrayRef.h>

#include <vector>

#include "runtime/registry.h"

namespace fsdp {

struct SliceUse {
  TrackedTensor tracked;
  const void* identity;  // of the TensorImpl, which may be gone when results are checked
  size_t position;       // in its list
  int64_t storage_offset;
  int64_t numel;
  bool requires_grad;
};

// A tensor that an operator writes slices into.
struct WrittenTensor {
  at::Tensor tensor;
  size_t position;  // in its list
};

// Throws c10::Error that names the parameter, the operator and what to call instead. Returns what becomes a slice by
// being written. REQUIRES: `slices` not empty, in the order of the arguments.
std::vector<WrittenTensor> check_slice_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack,
                                                 c10::ArrayRef<SliceUse> slices);
// After the operator: results and `written` are slices from now on.
void check_slice_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ArrayRef<SliceUse> slices,
                         const std::vector<WrittenTensor>& written);

}  // namespace fsdp
