#include "runtime/grad_norm.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/clamp_max.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>

#include "runtime/access_key.h"
#include "runtime/registry.h"

namespace fsdp {

namespace {

std::vector<at::Tensor> defined_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters)
    if (parameter.grad().defined()) gradients.push_back(parameter.grad());
  return gradients;
}

// What this rank adds to a norm over all ranks: its parts of gradients. Those that are whole on every rank are rank 0's.
std::vector<at::Tensor> gradients_to_count(const std::vector<at::Tensor>& parameters, int rank) {
  std::vector<at::Tensor> counted;
  for (const auto& parameter : parameters) {
    const auto tracked = registry::find(parameter);
    if (rank == 0 || !tracked || tracked->kind != TrackedTensor::Kind::REPLICATED) counted.push_back(parameter);
  }
  return defined_gradients(counted);
}

bool is_reduced(const at::Tensor& tensor) { return c10::isReducedFloatingType(tensor.scalar_type()); }

// LibTorch's own arithmetic, so that one process gives the result of the plain run to the last bit.
at::Tensor plain_norm(const std::vector<at::Tensor>& gradients, double norm_type) {
  const bool largest = std::isinf(norm_type);
  std::vector<at::Tensor> norms;
  for (const auto& gradient : gradients) {
    if (!largest)
      norms.push_back(gradient.norm(norm_type));
    else if (gradient.numel())
      norms.push_back(gradient.abs().max());  // of no elements LibTorch knows no largest
  }
  if (norms.empty()) return at::zeros({});
  if (norms.size() == 1) return norms.front();
  return largest ? at::stack(norms).max() : at::stack(norms).norm(norm_type);
}

bool has_plain_norm(const std::vector<at::Tensor>& gradients) {
  return std::all_of(gradients.begin(), gradients.end(), [&](const at::Tensor& gradient) {
    return gradient.scalar_type() == gradients.front().scalar_type() && !is_reduced(gradient);
  });
}

// In double, so that the result hardly depends on how the elements are spread over the ranks, nor on their dtype. Parts without elements
// add nothing.
at::Tensor wide_norm(const std::vector<at::Tensor>& parts, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const auto& part : parts)
    if (part.numel())
      norms.push_back(at::linalg_vector_norm(part, norm_type, c10::nullopt, false, part.is_complex() ? at::kComplexDouble : at::kDouble));
  return norms.empty() ? at::zeros({}, at::kDouble) : at::linalg_vector_norm(at::stack(norms), norm_type);
}

// Each rank's norm has a place of its own in what is summed. So the largest of all ranks comes by the same collective as their sum, and
// all ranks combine the same numbers in the same order. What a check of the gradients has found travels with them.
at::Tensor global_norm(const std::vector<at::Tensor>& gradients, double norm_type, ShardedModel& model) {
  auto& check = model.gradient_check();
  auto& collectives = model.collectives();
  const int64_t ranks = collectives.world_size();
  const auto device = model.units().front()->groups.front()->shard.device();
  // Always of this size: ranks that disagree about a check must not send other lengths.
  auto sums = at::zeros({ranks + 1}, at::dtype(at::kDouble).device(device));
  auto by_rank = sums.narrow(0, 0, ranks), found = sums.narrow(0, ranks, 1);
  by_rank[collectives.rank()] = wide_norm(gradients, norm_type);
  const bool asked = check.found.defined() && !check.agreed;
  if (asked) found.copy_(check.found);
  collectives.all_reduce(sums, "clip_grad_norm_").wait();
  if (asked) check = {found.to(at::kFloat), true};
  return at::linalg_vector_norm(by_rank, norm_type);
}

}  // namespace

ClipResult clip_gradients(ShardedModel& model, const std::vector<at::Tensor>& parameters, double max_norm, double norm_type) {
  TORCH_CHECK(max_norm >= 0, "clip_grad_norm_: max_norm must be at least 0, got ", max_norm);  // NaN is not
  TORCH_CHECK(norm_type > 0, "clip_grad_norm_: norm_type must be above 0 (1, 2, any p, or infinity for the largest), got ", norm_type);
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  const auto gradients = defined_gradients(parameters);
  const bool alone = model.world_size() == 1;
  const auto norm = !alone                      ? global_norm(gradients_to_count(parameters, model.rank()), norm_type, model)
                    : has_plain_norm(gradients) ? plain_norm(gradients, norm_type)
                                                : wide_norm(gradients, norm_type);
  const auto coefficient = at::clamp_max(max_norm / (norm + 1e-6), 1.0);
  const ClipResult result{norm.item<double>(), coefficient.item<double>()};
  if (result.coefficient == 1) return result;
  for (const auto& gradient : gradients) gradient.mul_(coefficient.to(is_reduced(gradient) ? at::kFloat : gradient.scalar_type()));
  return result;
}

void clip_gradient_values(const ShardedModel& model, const std::vector<at::Tensor>& parameters, double clip_value) {
  TORCH_CHECK(clip_value >= 0, "clip_grad_value_: clip_value must be at least 0, got ", clip_value);
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  for (const auto& parameter : parameters)
    TORCH_CHECK(!parameter.grad().defined() || !parameter.is_complex(), "rank ", model.rank(), ": clip_grad_value_: parameter '",
                registry::find(parameter)->parameter->name,
                "' is complex, and complex numbers have no order. Use clip_grad_norm_, or register its real and imaginary parts");
  for (const auto& gradient : defined_gradients(parameters)) gradient.clamp_(-clip_value, clip_value);
}

}  // namespace fsdp
