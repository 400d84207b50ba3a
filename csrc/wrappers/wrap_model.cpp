#include "wrappers/wrap_model.h"

#include <torch/nn/module.h>

#include "plan/observations.h"
#include "plan/planner.h"
#include "plan/unit_selection.h"
#include "wrappers/plan_agreement.h"

namespace fsdp {
namespace {

PlannedModel plan_locally(const torch::nn::Module& module, const ModuleTree& tree, const ProcessGroup& group, const FsdpOptions& options,
                          std::optional<c10::ScalarType> compute_dtype) {
  TORCH_CHECK(options.sharding_strategy == ShardingStrategy::FULL_SHARD, "unknown sharding strategy ",
              static_cast<int>(options.sharding_strategy), "; expected ShardingStrategy::FULL_SHARD");
  TORCH_CHECK(!tree.parameters.empty(), "rank ", group.rank(), ": module ", module.name(),
              " registers no parameters, so there is nothing to shard. Tensors and submodules held in plain members are invisible to "
              "LibTorch: register them with register_parameter and register_module");
  for (const auto& parameter : tree.parameters) check_can_be_sharded(parameter.registrations.front().name, parameter.tensor, group.rank());
  return make_plan(tree, select_units(tree, options.auto_wrap_policy), group.world_size(), compute_dtype);
}

}  // namespace

WrappedModel wrap_model(const torch::nn::Module& module, const ProcessGroup& group, const FsdpOptions& options,
                        std::optional<c10::ScalarType> compute_dtype) {
  const ModuleTree tree = walk_modules(module);
  PlannedModel planned;
  std::string refusal;
  try {
    planned = plan_locally(module, tree, group, options, compute_dtype);
  } catch (const c10::Error& error) {
    refusal = error.what_without_backtrace();  // the other ranks are told before this one gives up
  } catch (const std::exception& error) {      // of the user's policy
    refusal = c10::str("rank ", group.rank(), ": the wrap policy failed: ", error.what());
  }
  agree_on_plan(*group.collectives(), planned.plan, refusal);
  if (group.rank() == 0)
    for (const auto& observation : observe(tree, planned.plan)) TORCH_WARN("libfsdp: ", observation);

  WrappedModel wrapped;
  for (const auto& parameter : tree.parameters) wrapped.parameters.emplace_back(parameter.registrations.front().name, parameter.tensor);
  for (const auto& buffer : tree.buffers) wrapped.buffers.emplace_back(buffer.name, buffer.tensor);
  wrapped.model = ShardedModel::shard(
      std::move(planned), group.collectives(),
      {.sync_from_rank_0 = options.sync_module_states, .write_through = options.parameter_writes == ParameterWrites::WRITE_THROUGH});
  return wrapped;
}

}  // namespace fsdp
