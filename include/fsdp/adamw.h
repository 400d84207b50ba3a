/// AdamW and Adam over a sharded model: the numbers of torch::optim's, in a few calls for all parameters together.
///
///     fsdp::AdamW optimizer(model, {.lr = 3e-4, .weight_decay = 0.1});
///     const fsdp::CosineSchedule schedule{.warmup_steps = 100, .total_steps = 10'000};
///     loss.backward();
///     optimizer.set_lr_factor(schedule(step));
///     optimizer.step();
///     optimizer.zero_grad();
///
/// Works on this rank's flat shards through LibTorch's fused kernel, one call per flat group and parameter group, past the access hook.
/// The moments are this rank's slices too. Parameters without a gradient are left out: neither decayed nor moved, and their step is not
/// counted.
///
/// Thread safety: as FullyShardedDataParallel.
#pragma once

#include <fsdp/export.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/lr_schedule.h>
#include <fsdp/parameter_predicate.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

/// Defaults as torch::optim::AdamW's.
struct FSDP_API AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;           ///< beside the root of the second moment
  double weight_decay = 1e-2;  ///< decoupled: parameters shrink by lr * weight_decay a step, whatever their gradient
};

/// Defaults as torch::optim::Adam's.
struct FSDP_API AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;  ///< added to the gradient (an L2 penalty)
};

/// Parameters that share options, chosen by their names in the unwrapped model.
template <class Options>
struct ParameterGroup {
  ParameterPredicate parameters;  ///< name_contains("bias") or any function; empty: all that no earlier group has taken
  Options options;
};

template <class Options>
struct ParameterGroups {
  std::vector<ParameterGroup<Options>> groups;
};

/// What the optimizer knows of one parameter: this rank's slices, 1-D, possibly empty. They are the optimizer's own memory.
struct AdamState {
  std::string name;
  int64_t step = 0;
  at::Tensor exp_avg;     ///< first moment; fp32 for parameters in less
  at::Tensor exp_avg_sq;  ///< second moment
};

template <class Options>
class FusedAdam {
 public:
  /// All parameters of the model. Not collective; every rank must give the same options. Throws c10::Error on options out of range.
  FSDP_API explicit FusedAdam(const FullyShardedBase& model, const Options& options = {})
      : FusedAdam(detail::sharded_model(model), std::vector<ParameterGroup<Options>>{{{}, options}}) {}

  /// The parameters that some group takes, each belonging to the first that does; others are left to other optimizers. For example
  ///     fsdp::AdamW optimizer(model, {.groups = {{is_bias_or_norm, {.weight_decay = 0}}, {{}, {.weight_decay = 0.1}}}});
  /// Throws also when a group's function takes nothing.
  FSDP_API FusedAdam(const FullyShardedBase& model, ParameterGroups<Options> groups)
      : FusedAdam(detail::sharded_model(model), std::move(groups.groups)) {}

  FSDP_API ~FusedAdam();
  FSDP_API FusedAdam(FusedAdam&&) noexcept;
  FSDP_API FusedAdam& operator=(FusedAdam&&) noexcept;

  /// One step with the gradients found. All ranks must call, outside of forward and backward; nothing is communicated. A later backward
  /// through a graph made before raises LibTorch's error, as after any optimizer's step.
  FSDP_API void step();

  /// Makes the gradients of this optimizer's parameters undefined.
  FSDP_API void zero_grad();

  /// Of a parameter group, to read and to change between steps.
  FSDP_API Options& options(size_t group = 0);
  FSDP_API size_t groups() const;

  /// Multiplies every group's lr from the next step on: what schedules give.
  FSDP_API void set_lr_factor(double factor);
  FSDP_API double lr_factor() const;

  /// Of the parameters that have been stepped, in the order of the plan.
  FSDP_API std::vector<AdamState> state() const;

  /// Makes the parameters named stepped that often, with moments of zero, and all others never stepped; returns the former, for their
  /// moments to be filled. All ranks must give the same. Throws c10::Error, before anything changes, for a name that is not this
  /// optimizer's and a step below 1.
  FSDP_API std::vector<AdamState> restore(const std::map<std::string, int64_t>& steps);

 private:
  class Impl;
  FSDP_API FusedAdam(std::shared_ptr<ShardedModel> model, std::vector<ParameterGroup<Options>> groups);
  std::unique_ptr<Impl> impl_;
};

using AdamW = FusedAdam<AdamWOptions>;
using Adam = FusedAdam<AdamOptions>;

extern template class FusedAdam<AdamWOptions>;
extern template class FusedAdam<AdamOptions>;

}  // namespace fsdp
