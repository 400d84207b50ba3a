#include "wrappers/wrap_model.h"

#include <torch/nn/module.h>

#include <iterator>
#include <map>

#include "plan/budget.h"
#include "plan/observations.h"
#include "plan/planner.h"
#include "plan/registered_parameters.h"
#include "plan/unit_selection.h"
#include "runtime/registry.h"
#include "wrappers/plan_agreement.h"

namespace fsdp {
namespace {

// Two parameters on the same memory are one weight to the plain model; each would get memory of its own.
void check_disjoint(const ModuleTree& tree, int rank) {
  using Begin = std::pair<const c10::StorageImpl*, const char*>;
  std::map<Begin, std::pair<const char*, std::string>> by_begin;  // (storage, begin) → end, name
  for (const auto& parameter : tree.parameters) {
    const auto& tensor = parameter.tensor;
    if (tensor.layout() != at::kStrided || !tensor.has_storage() || tensor.numel() == 0) continue;
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto* end = begin + (last + 1) * static_cast<int64_t>(tensor.element_size());
    const auto& name = parameter.registrations.front().name;
    const auto* storage = tensor.storage().unsafeGetStorageImpl();
    const auto after = by_begin.upper_bound({storage, begin});
    const auto overlaps = [&](const auto& entry, bool is_before) {
      TORCH_CHECK(
          entry.first.first != storage || (is_before ? entry.second.first <= begin : end <= entry.first.second), "rank ", rank,
          ": parameters '", entry.second.second, "' and '", name,
          "' share memory (both are views of one tensor); sharding would part them. Register the whole tensor once and take the views in "
          "forward");
    };
    if (after != by_begin.end()) overlaps(*after, false);
    if (after != by_begin.begin()) overlaps(*std::prev(after), true);
    by_begin.emplace(std::pair{storage, begin}, std::pair{end, name});
  }
}

void check_precision(const MixedPrecision& precision, int rank) {
  const auto check = [&](const std::optional<c10::ScalarType>& dtype, const char* field) {
    TORCH_CHECK(!dtype || c10::isFloatingType(*dtype), "rank ", rank, ": MixedPrecision::", field, " is ", *dtype,
                "; expected a floating dtype, such as torch::kBFloat16 or torch::kFloat");
  };
  check(precision.param_dtype, "param_dtype");
  check(precision.reduce_dtype, "reduce_dtype");
  check(precision.buffer_dtype, "buffer_dtype");
  check(precision.output_dtype, "output_dtype");
}

PlannedModel plan_locally(const torch::nn::Module& module, const ModuleTree& tree, const ProcessGroup& group, const FsdpOptions& options) {
  TORCH_CHECK(!tree.parameters.empty(), "rank ", group.rank(), ": module ", module.name(),
              " registers no parameters, so there is nothing to shard. Tensors and submodules held in plain members are invisible to "
              "LibTorch: register them with register_parameter and register_module");
  check_precision(options.mixed_precision, group.rank());
  for (const auto& parameter : tree.parameters) check_can_be_sharded(parameter.registrations.front().name, parameter.tensor, group.rank());
  check_disjoint(tree, group.rank());
  PlannedModel planned = make_plan(tree, select_units(tree, options.auto_wrap_policy), group.world_size(), options);
  planned.budget = choose_budget(planned.plan, options, group.rank());
  planned.plan.max_unsharded_bytes = planned.budget.bytes;
  return planned;
}

bool is_left_out(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad() && !registry::is_sharded(tensor); }

}  // namespace

void check_still_wrapped(const torch::nn::Module& module, const torch::OrderedDict<std::string, at::Tensor>& wrapped, int rank) {
  bool complete = true;
  module.apply(torch::nn::Module::ConstModuleApplyFunction([&](const torch::nn::Module& each) {
    for (const auto& item : RegisteredParameters::of(each)) complete = complete && !is_left_out(item.value());
  }));
  if (complete) return;
  for (const auto& item : module.named_parameters()) {
    if (!is_left_out(item.value())) continue;
    TORCH_CHECK(!wrapped.contains(item.key()), "rank ", rank, ": parameter '", item.key(),
                "' was replaced by another tensor after its module was wrapped: the new one is not sharded, and each rank would train its "
                "own. Keep the tensor and copy values into it inside summon_full_params({.write_back = true}), or unwrap() and wrap anew");
    TORCH_CHECK(false, "rank ", rank, ": parameter '", item.key(),
                "' was registered after its module was wrapped: it is not sharded, and each rank would train its own. Register it before "
                "wrapping (a module that builds itself in forward: run one forward before wrapping), or unwrap() and wrap anew");
  }
}

WrappedModel wrap_model(const torch::nn::Module& module, const ProcessGroup& group, const FsdpOptions& options) {
  const ModuleTree tree = walk_modules(module);
  PlannedModel planned;
  std::string refusal;
  try {
    planned = plan_locally(module, tree, group, options);
  } catch (const c10::Error& error) {
    refusal = error.what_without_backtrace();  // the other ranks are told before this one gives up
  } catch (const std::exception& error) {      // of the user's policy
    refusal = c10::str("rank ", group.rank(), ": the wrap policy failed: ", error.what());
  }
  agree_on_plan(*group.collectives(), planned.plan, options, refusal);
  if (group.rank() == 0)
    for (const auto& observation : observe(tree, planned.plan)) TORCH_WARN("libfsdp: ", observation);

  if (options.check_order == CheckOrder::ORDER_ALWAYS) group.collectives()->check_always();

  if (const auto dtype = options.mixed_precision.buffer_dtype)
    for (const auto& buffer : tree.buffers)
      if (buffer.tensor.is_floating_point()) at::Tensor(buffer.tensor).set_data(buffer.tensor.to(*dtype));

  WrappedModel wrapped;
  for (const auto& parameter : tree.parameters) wrapped.parameters.emplace_back(parameter.registrations.front().name, parameter.tensor);
  for (const auto& buffer : tree.buffers) wrapped.buffers.emplace_back(buffer.name, buffer.tensor);
  wrapped.model = ShardedModel::shard(std::move(planned), group.collectives(),
                                      {.sync_from_rank_0 = options.sync_module_states,
                                       .write_through = options.parameter_writes == ParameterWrites::WRITE_THROUGH,
                                       .param_dtype = options.mixed_precision.param_dtype,
                                       .casts_inputs = options.mixed_precision.cast_forward_inputs});
  return wrapped;
}

}  // namespace fsdp
