#include "runtime/slice_rules.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "runtime/flat_group.h"
#include "runtime/operator_arguments.h"
#include "runtime/sharded_model.h"

namespace fsdp {
namespace {

constexpr const char* kRemedy =
    "Use the wrapper: model(x), model->method(x), or model.call([](auto& module) { ... }); for gradient norms model.clip_grad_norm_; to "
    "look at whole parameters model.summon_full_params()";

std::string describe(const SliceUse& use) {
  const auto& group = *use.tracked.group;
  std::string name;
  if (use.tracked.parameter)
    name = "'" + use.tracked.parameter->name + "'";
  else if (group.parameters.size() == 1)
    name = "'" + group.parameters.front().name + "'";
  else
    name = "in " + group.unit_title;
  const bool gradient = use.tracked.kind == TrackedTensor::Kind::GRADIENT;
  return std::string(gradient ? "the gradient of sharded parameter " : "sharded parameter ") + name;
}

std::string holds(const SliceUse& use) {
  const auto& group = *use.tracked.group;
  return "outside the wrapper it holds rank " + std::to_string(group.rank) + "'s slice only (1-D, " + std::to_string(use.numel) +
         " elements)";
}

// Operators whose answer is no tensor, and would be one rank's answer.
constexpr std::array<std::string_view, 5> kLocalAnswers{"aten::item", "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero",
                                                        "aten::allclose"};

bool is_slice_sized(const at::Tensor& tensor, const std::vector<SliceUse>& slices) {
  if (tensor.dim() == 0) return true;
  return tensor.dim() == 1 && std::any_of(slices.begin(), slices.end(), [&](const SliceUse& use) { return use.numel == tensor.numel(); });
}

}  // namespace

void check_slice_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const std::vector<SliceUse>& slices) {
  const auto& name = schema.name();
  const int world_size = slices.front().tracked.model->world_size();
  const auto& first = slices.front();
  if (c10::GradMode::is_enabled() && name != "aten::detach")
    for (const auto& use : slices)
      TORCH_CHECK(!use.requires_grad, name, " cannot put ", describe(use), " into an autograd graph here: ", holds(use), ". ", kRemedy);
  TORCH_CHECK(world_size == 1 || name != "aten::abs", name, " of ", describe(first),
              " sees one rank only (torch::nn::utils::clip_grad_norm_ begins so): ", holds(first), ". ", kRemedy);
  TORCH_CHECK(world_size == 1 || name != "aten::cat", name, " of ", describe(first),
              " sees one rank only (torch::optim::LBFGS begins so: it needs whole parameters and cannot train a sharded model): ",
              holds(first), ". ", kRemedy);
  TORCH_CHECK(world_size == 1 || std::find(kLocalAnswers.begin(), kLocalAnswers.end(), name) == kLocalAnswers.end(), name, " of ",
              describe(first), " would answer for one rank only: ", holds(first), ". ", kRemedy);
  const auto count = schema.arguments().size();
  visit_tensors(stack, stack.size() - count, count, [&](const at::Tensor& tensor, size_t, size_t) -> std::optional<at::Tensor> {
    TORCH_CHECK(is_slice_sized(tensor, slices), name, " cannot combine ", describe(first), " with a tensor of shape ", tensor.sizes(), ": ",
                holds(first), ". ", kRemedy, ". An optimizer that made steps before wrapping holds state of the full shape: build it anew");
    return std::nullopt;
  });
}

void check_slice_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, const std::vector<SliceUse>& slices) {
  if (slices.front().tracked.model->world_size() == 1) return;
  const auto count = schema.returns().size();
  visit_tensors(stack, stack.size() - count, count, [&](const at::Tensor& tensor, size_t, size_t) -> std::optional<at::Tensor> {
    const bool same_size =
        tensor.dim() == 1 && std::any_of(slices.begin(), slices.end(), [&](const SliceUse& use) { return use.numel == tensor.numel(); });
    TORCH_CHECK(same_size, schema.name(), " of ", describe(slices.front()), " sees one rank only: ", holds(slices.front()), ". ", kRemedy);
    return std::nullopt;
  });
}

}  // namespace fsdp
