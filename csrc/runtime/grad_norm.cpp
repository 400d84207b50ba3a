#include "runtime/grad_norm.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>

#include <algorithm>
#include <cmath>

#include "runtime/access_key.h"

namespace fsdp {

ClipResult clip_gradients(ShardedModel& model, double max_norm) {
  TORCH_CHECK(max_norm >= 0 && !std::isnan(max_norm), "clip_grad_norm_: max_norm must be at least 0, got ", max_norm);
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  std::vector<at::Tensor> gradients;
  for (const auto& unit : model.units())
    for (const auto& group : unit->groups)
      for (const auto& parameter : group->parameters)
        if (parameter.handle.grad().defined()) gradients.push_back(parameter.handle.grad());

  // Summed in double: the result must not depend on how the elements are spread over ranks.
  double sum = 0;
  for (const auto& gradient : gradients) {
    const double norm = at::linalg_vector_norm(gradient, 2, c10::nullopt, false, at::kDouble).item<double>();
    sum += norm * norm;
  }
  auto total = at::full({1}, sum, at::kDouble);
  if (model.world_size() > 1) model.collectives().all_reduce(total, "clip_grad_norm_").wait();

  ClipResult result;
  result.norm = std::sqrt(total.item<double>());
  result.coefficient = std::min(1.0, max_norm / (result.norm + 1e-6));
  if (result.coefficient < 1.0 || std::isnan(result.norm))
    for (auto& gradient : gradients) gradient.mul_(result.coefficient);
  return result;
}

}  // namespace fsdp
