/// Trains a plain torch::nn::Module with its parameters, gradients and optimizer state spread over the ranks.
///
///     Net net;                                                     // unmodified
///     torch::optim::AdamW optimizer(net->parameters(), 1e-3);      // before or after wrapping
///     fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1'000'000)});
///     auto loss = torch::nn::functional::cross_entropy(model(x), y);
///     loss.backward();
///     model.clip_grad_norm_(1.0);
///     optimizer.step();
///     optimizer.zero_grad();
///
/// The module's parameters are replaced in place by this rank's slices. While the wrapper runs the module they have their full
/// shape and are gathered as they are read; outside, they are slices (1-D, possibly empty), good for optimizers and nothing else.
///
/// Thread safety: one thread at a time per model. All ranks must call forward, backward and the members marked so, in the same
/// order. Errors are c10::Error.
#pragma once

#include <fsdp/clip_result.h>
#include <fsdp/export.h>
#include <fsdp/options.h>
#include <fsdp/plan.h>
#include <fsdp/process_group.h>
#include <fsdp/stats.h>

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <concepts>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

class FullyShardedBase;
class ShardedModel;
struct Unit;

FSDP_API void shard_optimizer_state(torch::optim::Optimizer& optimizer, const FullyShardedBase& model);  // optimizer_state.h

namespace detail {
FSDP_API std::shared_ptr<ShardedModel> sharded_model(const FullyShardedBase& model);  // for the library's own optimizers
// Parameters that the model's modules have got since it was wrapped: whole on every rank, with rank 0's values. All ranks must call.
void add_unsharded(FullyShardedBase& model, const std::vector<std::pair<std::string, at::Tensor>>& parameters);
}  // namespace detail

/// While one lives, the model's parameters have their full shape. Brackets nest. What model(x), model-> and call open.
class FSDP_API ComputingBracket {
 public:
  explicit ComputingBracket(std::shared_ptr<ShardedModel> model);
  ~ComputingBracket();
  ComputingBracket(const ComputingBracket&) = delete;
  ComputingBracket& operator=(const ComputingBracket&) = delete;

 private:
  std::shared_ptr<ShardedModel> model_;
};

struct SummonOptions {
  /// true: parameters may be written to; when the scope ends each rank keeps its part of what changed. Every rank must write the same
  /// values. false: writing operators are refused, and what is written through pointers is lost.
  bool write_back = false;
  /// Names of units, as in plan(); empty: all. Summoning one unit costs one unit's memory.
  std::vector<std::string> units = {};
};

/// While one lives, parameters of the model are whole and have memory: what summon_full_params returns.
class [[nodiscard]] FSDP_API FullParameters {
 public:
  FullParameters(std::shared_ptr<ShardedModel> model, const SummonOptions& options);
  ~FullParameters();
  FullParameters(const FullParameters&) = delete;
  FullParameters& operator=(const FullParameters&) = delete;

 private:
  ComputingBracket bracket_;
  std::shared_ptr<ShardedModel> model_;
  std::vector<Unit*> units_;
  bool write_back_;
};

/// While one lives, backwards keep whole gradients instead of reducing them: what no_sync returns.
class [[nodiscard]] FSDP_API NoSync {
 public:
  explicit NoSync(std::shared_ptr<ShardedModel> model);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  std::shared_ptr<ShardedModel> model_;
  bool before_;
};

/// The part of FullyShardedDataParallel that does not depend on the wrapped type.
class FSDP_API FullyShardedBase : public torch::nn::Module {
 public:
  FullyShardedBase(const FullyShardedBase&) = delete;
  FullyShardedBase& operator=(const FullyShardedBase&) = delete;
  FullyShardedBase(FullyShardedBase&&) = default;
  FullyShardedBase& operator=(FullyShardedBase&&) = default;
  ~FullyShardedBase() override;  ///< not collective; the module's parameters stay slices

  /// Scales all gradients so that their common norm, the `norm_type`-norm over all elements of all ranks, is at most `max_norm`; one
  /// all-reduce. norm_type: above 0, infinity for the largest element. All ranks must call, after backward, also those without gradients.
  /// Every element counts once, whatever its dtype; over ranks the norm is computed in double. The coefficient is
  /// min(1, max_norm / (norm + 1e-6)), as in torch::nn::utils::clip_grad_norm_.
  ///
  /// A norm that is not finite is no error: it is returned, and the gradients are scaled by the coefficient that follows, as LibTorch does:
  /// 0 for an infinite norm (infinite elements become NaN), NaN for a NaN (all become NaN). That is the same on all ranks, so
  /// `std::isfinite(result.norm)` is a decision that they share.
  ClipResult clip_grad_norm_(double max_norm, double norm_type = 2.0);

  /// Brings every element of every gradient into [-clip_value, clip_value]; NaN stays NaN. Not collective. Throws, naming the parameter,
  /// where a complex one has a gradient.
  void clip_grad_value_(double clip_value);

  /// For accumulation over micro-batches. Without it each backward reduces its gradients and adds them to the shards: least memory, one
  /// reduction per unit and micro-batch. While the result lives, backwards keep whole gradients on each rank and communicate nothing;
  /// the first backward after it reduces them with its own. Any sequence of both adds up to the same sum. What counts is when backward
  /// runs, not forward. All ranks must do alike, or get an error that names who does what. `.grad` shows what has been reduced so far;
  /// the wrapper's zero_grad also drops what is kept, an optimizer's does not.
  NoSync no_sync();

  /// The sum of the ranks' gradients is divided by this, from now on; the world size unless set. For a loss that is a sum over tokens:
  /// the number of tokens on all ranks together. All ranks must set the same. Positive and finite.
  void set_gradient_divisor(double divisor);

  /// Undefines (or zeroes) every .grad and drops whole gradients that no_sync has kept.
  void zero_grad(bool set_to_none = true) override;

  /// Gathers the whole model, or the units named, for as long as the result lives: parameters have their full shape and can be
  /// read by operators and pointers. All ranks must call. Costs the memory of what is summoned.
  FullParameters summon_full_params(const SummonOptions& options = {});

  const Plan& plan() const;  ///< units, groups and where parameters lie
  Stats stats() const;       ///< collectives so far and memory now

  /// The unwrapped model's, under their original names, each tensor once. Parameters are this rank's slices.
  std::vector<at::Tensor> parameters() const;
  torch::OrderedDict<std::string, at::Tensor> named_parameters() const;
  std::vector<at::Tensor> buffers() const;
  torch::OrderedDict<std::string, at::Tensor> named_buffers() const;

  /// These would act on one rank's slices: they throw and name what to do.
  void to(torch::Device device, torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Dtype dtype, bool non_blocking = false) override;
  void to(torch::Device device, bool non_blocking = false) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  std::shared_ptr<torch::nn::Module> clone(const std::optional<torch::Device>& device = std::nullopt) const override;

 protected:
  FullyShardedBase(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, const FsdpOptions& options);
  const std::shared_ptr<ShardedModel>& model() const;         // throws after unwrap
  const std::shared_ptr<ShardedModel>& model_to_run() const;  // throws also when the module has got parameters that are not sharded
  void unwrap_parameters();
  const std::optional<c10::ScalarType>& output_dtype() const { return output_dtype_; }

 private:
  friend void shard_optimizer_state(torch::optim::Optimizer& optimizer, const FullyShardedBase& model);
  friend std::shared_ptr<ShardedModel> detail::sharded_model(const FullyShardedBase& model);
  friend void detail::add_unsharded(FullyShardedBase& model, const std::vector<std::pair<std::string, at::Tensor>>& parameters);

  std::shared_ptr<ShardedModel> model_;
  std::optional<c10::ScalarType> output_dtype_;
  torch::OrderedDict<std::string, at::Tensor> parameters_by_name_;
  torch::OrderedDict<std::string, at::Tensor> buffers_by_name_;
};

namespace detail {

/// What forward returned, for the caller: a parameter would turn into a slice in his hands, so he gets an alias that stays whole;
/// floating tensors become `dtype`, where there is one. Looks into vectors and tuples.
FSDP_API at::Tensor as_output(at::Tensor result, const std::optional<c10::ScalarType>& dtype);
inline std::vector<at::Tensor> as_output(std::vector<at::Tensor> results, const std::optional<c10::ScalarType>& dtype) {
  for (auto& each : results) each = as_output(std::move(each), dtype);
  return results;
}
template <class Result>
Result as_output(Result&& result, const std::optional<c10::ScalarType>&) {
  return std::forward<Result>(result);
}
template <class... Results>
std::tuple<Results...> as_output(std::tuple<Results...> results, const std::optional<c10::ScalarType>& dtype) {
  std::apply([&](auto&... each) { ((each = as_output(std::move(each), dtype)), ...); }, results);
  return results;
}

}  // namespace detail

template <std::derived_from<torch::nn::Module> Impl>
class FullyShardedDataParallel : public FullyShardedBase {
 public:
  /// Shards `module`; it must not be wrapped already. All ranks must call, with the same module and options. Values come from rank 0
  /// unless options say otherwise. Before anything changes, throws when ranks disagree (naming the first differences and who
  /// has them) and when a parameter cannot be sharded (naming it).
  FullyShardedDataParallel(std::shared_ptr<Impl> module, const ProcessGroup& group, const FsdpOptions& options = {})
      : FullyShardedBase(module, group, options), module_(std::move(module)) {}
  FullyShardedDataParallel(const torch::nn::ModuleHolder<Impl>& holder, const ProcessGroup& group, const FsdpOptions& options = {})
      : FullyShardedDataParallel(holder.is_empty() ? nullptr : holder.ptr(), group, options) {}
  /// REQUIRES: `module` outlives the wrapper.
  FullyShardedDataParallel(Impl& module, const ProcessGroup& group, const FsdpOptions& options = {})
      : FullyShardedDataParallel(std::shared_ptr<Impl>(&module, [](Impl*) {}), group, options) {}

  /// The module's own forward, with whatever it takes and returns.
  template <class... Arguments>
  decltype(auto) forward(Arguments&&... arguments) {
    ComputingBracket bracket(model_to_run());
    return detail::as_output(module_->forward(std::forward<Arguments>(arguments)...), output_dtype());
  }
  template <class... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    return forward(std::forward<Arguments>(arguments)...);
  }

  /// model->method(x): any member of the module, with full parameters until the end of the full expression.
  class Arrow {
   public:
    Arrow(std::shared_ptr<ShardedModel> model, Impl& module) : bracket_(std::move(model)), module_(module) {}
    Impl* operator->() { return &module_; }

   private:
    ComputingBracket bracket_;
    Impl& module_;
  };
  Arrow operator->() { return Arrow(model_to_run(), *module_); }

  /// Runs fn(Impl&) with full parameters and returns what it returns.
  template <class Function>
  decltype(auto) call(Function&& function) {
    ComputingBracket bracket(model_to_run());
    if constexpr (std::is_void_v<std::invoke_result_t<Function, Impl&>>)
      return std::forward<Function>(function)(*module_);
    else
      return detail::as_output(std::forward<Function>(function)(*module_), output_dtype());
  }

  /// Makes the module plain again: whole parameters (and gradients, where defined) on every rank, no trace of sharding. All ranks must
  /// call, between steps. The wrapper is empty afterwards. Optimizer state keeps the slices' shape: build a new optimizer.
  std::shared_ptr<Impl> unwrap() {
    unwrap_parameters();
    return module_;
  }

  /// The module itself, without opening a bracket: its parameters are slices.
  const std::shared_ptr<Impl>& module() const { return module_; }

 private:
  std::shared_ptr<Impl> module_;
};

template <class Holder>
requires requires { typename Holder::ContainedType; }
FullyShardedDataParallel(const Holder&, const ProcessGroup&, FsdpOptions = {})->FullyShardedDataParallel<typename Holder::ContainedType>;
template <class Impl>
FullyShardedDataParallel(std::shared_ptr<Impl>, const ProcessGroup&, FsdpOptions = {}) -> FullyShardedDataParallel<Impl>;
template <std::derived_from<torch::nn::Module> Impl>
FullyShardedDataParallel(Impl&, const ProcessGroup&, FsdpOptions = {}) -> FullyShardedDataParallel<Impl>;

}  // namespace fsdp
