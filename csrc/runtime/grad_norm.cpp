#include "runtime/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include "runtime/access_key.h"

namespace fsdp {

namespace {

// One process: LibTorch's own arithmetic, so that the result is that of the plain run to the last bit.
at::Tensor local_norm(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> norms;
  for (const auto& gradient : gradients) norms.push_back(gradient.norm());
  return norms.size() == 1 ? norms.front() : at::stack(norms).norm();
}

// Squares are summed in double, so that the result hardly depends on how the elements are spread over the ranks.
at::Tensor global_norm(const std::vector<at::Tensor>& gradients, CountedCollectives& collectives) {
  auto sum = at::zeros({1}, at::kDouble);
  for (const auto& gradient : gradients) sum.add_(at::linalg_vector_norm(gradient, 2, c10::nullopt, false, at::kDouble).square());
  collectives.all_reduce(sum, "clip_grad_norm_").wait();
  return sum.sqrt_().squeeze();
}

}  // namespace

ClipResult clip_gradients(ShardedModel& model, const std::vector<at::Tensor>& parameters, double max_norm) {
  TORCH_CHECK(max_norm >= 0, "clip_grad_norm_: max_norm must be at least 0, got ", max_norm);  // NaN is not
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  // .grad is defined on all ranks or on none, so all ranks return here alike.
  if (gradients.empty()) return {};

  const auto norm = model.world_size() == 1 ? local_norm(gradients) : global_norm(gradients, model.collectives());
  const auto coefficient = at::clamp_max(max_norm / (norm + 1e-6), 1.0);
  for (auto& gradient : gradients) gradient.mul_(coefficient.to(gradient.scalar_type()));
  return {norm.item<double>(), coefficient.item<double>()};
}

}  // namespace fsdp
