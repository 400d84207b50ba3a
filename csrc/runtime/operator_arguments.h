// Every tensor among an operator's arguments or results on the interpreter stack, wherever it hides: plain, optional, in Tensor[],
// in Tensor?[] (indexing), in generic lists.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>

#include <optional>

namespace fsdp {

// visit(tensor, slot, position) is called for every defined tensor in stack[first, first+count): `slot` counts from `first`, `position`
// within a list (0 for a plain tensor). It returns a tensor to put in its place, or nullopt to leave it. Lists are copied before they
// change: the caller may own them.
template <class Visit>
void visit_tensors(torch::jit::Stack& stack, size_t first, size_t count, Visit visit) {
  for (size_t slot = 0; slot < count; ++slot) {
    auto& value = stack[first + slot];
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (!tensor.defined()) continue;
      if (std::optional<at::Tensor> other = visit(tensor, slot, size_t{0})) value = *std::move(other);
    } else if (value.isTensorList()) {
      auto list = value.toTensorList();
      bool copied = false;
      for (size_t i = 0; i < list.size(); ++i) {
        const at::Tensor tensor = list.get(i);
        if (!tensor.defined()) continue;
        if (std::optional<at::Tensor> other = visit(tensor, slot, i)) {
          if (!std::exchange(copied, true)) list = list.copy();
          list.set(i, *std::move(other));
        }
      }
      if (copied) value = std::move(list);
    } else if (value.isList()) {
      auto list = value.toList();
      bool copied = false;
      for (size_t i = 0; i < list.size(); ++i) {
        const c10::IValue element = list.get(i);
        if (!element.isTensor() || !element.toTensor().defined()) continue;
        if (std::optional<at::Tensor> other = visit(element.toTensor(), slot, i)) {
          if (!std::exchange(copied, true)) list = list.copy();
          list.set(i, *std::move(other));
        }
      }
      if (copied) value = std::move(list);
    }
  }
}

}  // namespace fsdp
