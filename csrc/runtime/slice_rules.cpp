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

// Whose slice it is; null where a tensor reaches several or none. For messages: not cheap.
const ShardedParameter* parameter_of(const SliceUse& use) {
  if (use.tracked.parameter) return use.tracked.parameter;
  const auto& parameters = use.tracked.group->parameters;
  // By identity first: an empty slice lies nowhere.
  for (const auto& parameter : parameters)
    if (use.identity == parameter.gradient_slice.unsafeGetTensorImpl()) return &parameter;
  for (const auto& parameter : parameters) {
    const int64_t begin = use.storage_offset - parameter.slice.storage_offset();
    if (use.numel > 0 && begin >= 0 && begin + use.numel <= parameter.slice.numel()) return &parameter;
  }
  return parameters.size() == 1 ? &parameters.front() : nullptr;
}

std::string describe(const SliceUse& use) {
  const auto& group = *use.tracked.group;
  const auto* parameter = parameter_of(use);
  const auto name = parameter ? "'" + parameter->name + "' (" + group.unit_title + ")" : "in " + group.unit_title;
  const bool gradient = use.tracked.kind == TrackedTensor::Kind::GRADIENT;
  return std::string(gradient ? "the gradient of sharded parameter " : "sharded parameter ") + name;
}

std::string holds(const SliceUse& use) {
  const auto& group = *use.tracked.group;
  return "outside the wrapper it holds rank " + std::to_string(group.rank) + "'s slice only (1-D, " + std::to_string(use.numel) +
         " elements)";
}

// Optimizers that made their state before wrapping are told apart by the shape they bring.
std::string remedy_for(const at::Tensor& tensor, const std::vector<SliceUse>& slices) {
  const bool full_shape = std::any_of(slices.begin(), slices.end(), [&](const SliceUse& use) {
    const auto* parameter = parameter_of(use);
    return parameter && tensor.sizes() == at::IntArrayRef(parameter->full_shape);
  });
  if (!full_shape) return kRemedy;
  return std::string(
             "That is the parameter's full shape. Optimizers that stepped before wrapping, and Adagrad built before it, hold state of "
             "that shape: convert it right after wrapping, before the first step, with fsdp::shard_optimizer_state(optimizer, model). In "
             "other code: ") +
         kRemedy;
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
                holds(first), ". ", remedy_for(tensor, slices));
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
