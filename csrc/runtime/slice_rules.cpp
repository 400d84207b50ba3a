#include "runtime/slice_rules.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

#include "runtime/access_key.h"
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

const char* what_it_is(TrackedTensor::Kind kind) {
  switch (kind) {
    case TrackedTensor::Kind::GRADIENT:
      return "the gradient of sharded parameter ";
    case TrackedTensor::Kind::DERIVED:
      return "a value computed from sharded parameter ";
    default:
      return "sharded parameter ";
  }
}

std::string describe(const SliceUse& use) {
  const auto& group = *use.tracked.group;
  const auto* parameter = parameter_of(use);
  const auto name = parameter ? "'" + parameter->name + "' (" + group.unit_title + ")" : "in " + group.unit_title;
  return what_it_is(use.tracked.kind) + name;
}

// In forward, and in backward where it reads parameters.
bool parameters_are_whole(const SliceUse& use) {
  return use.tracked.model->computing() || torch::autograd::get_current_graph_task_id() >= 0;
}

std::string holds(const SliceUse& use) {
  return std::string(parameters_are_whole(use) ? "parameters are whole here, but this is" : "outside the wrapper it holds") + " rank " +
         std::to_string(use.tracked.group->rank) + "'s slice only (1-D, " + std::to_string(use.numel) + " elements)";
}

// Optimizers that made their state before wrapping are told apart by the shape they bring.
std::string remedy_for(const at::Tensor& tensor, c10::ArrayRef<SliceUse> slices) {
  if (parameters_are_whole(slices.front()))
    return "Optimizers step, and gradients are used, outside of model(x), model->method(x), model.call, summon_full_params and backward, "
           "where parameters are slices too; whole copies of parameters are made inside";
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

bool is_local_answer(const c10::FunctionSchema& schema) {
  return std::find(kLocalAnswers.begin(), kLocalAnswers.end(), schema.name()) != kLocalAnswers.end();
}

// Along a dimension elements meet each other (softmax, cumsum, sort), and a slice's end is not the parameter's.
bool goes_along_dimension(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& argument) { return argument.name() == "dim" || argument.name() == "dims"; });
}

bool has_size_of_a_slice(const at::Tensor& tensor, c10::ArrayRef<SliceUse> slices) {
  return tensor.dim() == 1 && std::any_of(slices.begin(), slices.end(), [&](const SliceUse& use) { return use.numel == tensor.numel(); });
}

// An out= argument that the operator will give its size.
bool is_unsized(const at::Tensor& tensor) { return tensor.dim() == 1 && tensor.numel() == 0; }

// Of no history: allowed in grad mode.
bool is_factory(const std::string& name) { return name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0; }

bool is_one_of(const at::Tensor& tensor, c10::ArrayRef<SliceUse> slices) {
  return std::any_of(slices.begin(), slices.end(), [&](const SliceUse& use) { return use.identity == tensor.unsafeGetTensorImpl(); });
}

bool is_gathered(const at::Tensor& tensor) {
  if (!tensor.key_set().has(kAccessKey)) return false;
  const auto tracked = registry::find(tensor);
  return tracked && tracked->kind == TrackedTensor::Kind::UNSHARDED;
}

bool is_part_of_more(const at::Tensor& tensor) {
  return tensor.has_storage() && tensor.storage().nbytes() > static_cast<size_t>(tensor.numel()) * tensor.element_size();
}

// Whose slice the operator's result is: lists are worked through side by side.
const ShardedParameter& origin_of(const at::Tensor& result, size_t position, c10::ArrayRef<SliceUse> slices) {
  const auto fits = [&](const SliceUse& use) { return use.numel == result.numel(); };
  const SliceUse* best = position < slices.size() && slices[position].position == position ? &slices[position] : &slices.front();
  if (!fits(*best)) {
    const auto* other = std::find_if(slices.begin(), slices.end(), fits);
    if (other != slices.end()) best = other;
  }
  const auto* parameter = parameter_of(*best);
  return parameter ? *parameter : best->tracked.group->parameters.front();
}

}  // namespace

std::vector<WrittenTensor> check_slice_arguments(const c10::FunctionSchema& schema, torch::jit::Stack& stack,
                                                 c10::ArrayRef<SliceUse> slices) {
  const auto& name = schema.name();
  const auto& arguments = schema.arguments();
  const auto& first = slices.front();
  const bool over_ranks = first.tracked.model->world_size() > 1;
  if (c10::GradMode::is_enabled() && name != "aten::detach" && !is_factory(name))
    for (const auto& use : slices)
      TORCH_CHECK(!use.requires_grad, name, " cannot put ", describe(use), " into an autograd graph here: ", holds(use), ". ", kRemedy);
  if (over_ranks) {
    TORCH_CHECK(name != "aten::cat", name, " of ", describe(first),
                " sees one rank only (torch::optim::LBFGS begins so: it needs whole parameters and cannot train a sharded model): ",
                holds(first), ". ", kRemedy);
    TORCH_CHECK(!is_local_answer(schema), name, " of ", describe(first), " would answer for one rank only: ", holds(first), ". ", kRemedy);
    TORCH_CHECK(!goes_along_dimension(schema), name, " of ", describe(first), " sees one rank only: ", holds(first), ". ", kRemedy);
  }
  std::vector<WrittenTensor> written;
  const auto* next = slices.begin();  // they were found in this order
  const auto visit = [&](const at::Tensor& tensor, size_t slot, size_t position) -> std::optional<at::Tensor> {
    const bool is_slice = next != slices.end() && next->identity == tensor.unsafeGetTensorImpl();
    if (is_slice) ++next;
    const bool is_written = arguments[slot].alias_info() && arguments[slot].alias_info()->isWrite();
    const bool gathered = !is_slice && is_gathered(tensor);
    const bool fits =
        tensor.dim() == 0 || (is_slice ? tensor.dim() == 1 : has_size_of_a_slice(tensor, slices)) || (is_written && is_unsized(tensor));
    TORCH_CHECK(fits && !gathered, name, " cannot combine ", describe(first), gathered ? " with a gathered parameter" : " with a tensor",
                " of shape ", tensor.sizes(), ": ", holds(first), ". ", remedy_for(tensor, slices));
    if (is_slice || !is_written) return std::nullopt;
    TORCH_CHECK(!over_ranks || tensor.dim() == 1, name, " of ", describe(first), " sees one rank only: ", holds(first), ". ", kRemedy);
    TORCH_CHECK(!over_ranks || !is_part_of_more(tensor), name, " cannot write ", describe(first),
                " into a part of a larger tensor, which would no longer show that it holds slices: ", holds(first),
                ". Keep it in a tensor of its own, such as torch::zeros_like(parameter)");
    if (tensor.dim() == 1) written.push_back({tensor, position});
    return std::nullopt;
  };
  visit_tensors(stack, stack.size() - arguments.size(), arguments.size(), visit);
  return written;
}

void check_slice_results(const c10::FunctionSchema& schema, torch::jit::Stack& stack, c10::ArrayRef<SliceUse> slices,
                         const std::vector<WrittenTensor>& written) {
  const bool over_ranks = slices.front().tracked.model->world_size() > 1;
  const bool returns_arguments = schema.is_mutable();
  const auto count = schema.returns().size();
  visit_tensors(stack, stack.size() - count, count, [&](const at::Tensor& tensor, size_t, size_t position) -> std::optional<at::Tensor> {
    const bool is_slice = has_size_of_a_slice(tensor, slices);
    TORCH_CHECK(is_slice || !over_ranks, schema.name(), " of ", describe(slices.front()), " sees one rank only: ", holds(slices.front()),
                ". ", kRemedy);
    if (is_slice && !(returns_arguments && is_one_of(tensor, slices))) registry::mark_derived(tensor, origin_of(tensor, position, slices));
    return std::nullopt;
  });
  for (const auto& [tensor, position] : written) registry::mark_derived(tensor, origin_of(tensor, position, slices));
}

}  // namespace fsdp
