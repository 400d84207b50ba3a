#include "runtime/precision.h"

#include <ATen/core/Tensor.h>

#include <algorithm>

#include "runtime/access_key.h"
#include "runtime/operator_arguments.h"

namespace fsdp {
namespace {

constexpr c10::ScalarType kWide = c10::ScalarType::Float;

bool is_floating(const at::Tensor& tensor) { return c10::isFloatingType(tensor.scalar_type()); }

bool writes_to_floating(const c10::FunctionSchema& schema, torch::jit::Stack& stack) {
  const auto& arguments = schema.arguments();
  bool writes = false;
  visit_tensors(stack, stack.size() - arguments.size(), arguments.size(),
                [&](const at::Tensor& tensor, size_t slot, size_t) -> std::optional<at::Tensor> {
                  const auto* alias = arguments[slot].alias_info();
                  writes = writes || (alias && alias->isWrite() && is_floating(tensor));
                  return std::nullopt;
                });
  return writes;
}

// Casts the arguments for which `pick` holds.
template <class Pick>
bool cast(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType dtype, Pick pick) {
  const size_t count = schema.arguments().size();
  bool any = false;
  visit_tensors(stack, stack.size() - count, count, [&](const at::Tensor& tensor, size_t, size_t) -> std::optional<at::Tensor> {
    if (!is_floating(tensor) || !pick(tensor)) return std::nullopt;
    any = true;
    return tensor.to(dtype);
  });
  return any;
}

}  // namespace

bool widen_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType narrow) {
  if (writes_to_floating(schema, stack)) return false;
  return cast(schema, stack, kWide, [&](const at::Tensor& tensor) { return tensor.scalar_type() == narrow; });
}

void narrow_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType narrow) {
  const size_t count = schema.returns().size();
  visit_tensors(stack, stack.size() - count, count, [&](const at::Tensor& tensor, size_t, size_t) -> std::optional<at::Tensor> {
    if (tensor.scalar_type() != kWide) return std::nullopt;
    return tensor.to(narrow);
  });
}

void narrow_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ScalarType narrow) {
  const auto& name = schema.name();
  if (name == "aten::to" || name == "aten::type_as" || writes_to_floating(schema, stack)) return;
  cast(schema, stack, narrow, [&](const at::Tensor& tensor) {
    return !tensor.key_set().has(kAccessKey) && c10::elementSize(tensor.scalar_type()) > c10::elementSize(narrow);
  });
}

}  // namespace fsdp
