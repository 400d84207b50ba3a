#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/record_function.h>
#include <fsdp/adamw.h>

#include <set>
#include <type_traits>
#include <utility>

#include "optim/flat_moments.h"
#include "runtime/access_key.h"

namespace fsdp {
namespace {

template <class Options>
constexpr bool kDecoupled = std::is_same_v<Options, AdamWOptions>;
template <class Options>
constexpr const char* kName = kDecoupled<Options> ? "fsdp::AdamW" : "fsdp::Adam";

template <class Options>
void check(const Options& o) {
  const auto at_least_0 = [](const char* what, double value) {
    TORCH_CHECK(value >= 0, kName<Options>, ": ", what, " must be at least 0, got ", value);
  };
  const auto is_beta = [](const char* what, double value) {
    TORCH_CHECK(value >= 0 && value < 1, kName<Options>, ": ", what, " must be at least 0 and below 1, got ", value);
  };
  at_least_0("lr", o.lr);
  is_beta("beta1", o.beta1);
  is_beta("beta2", o.beta2);
  at_least_0("eps", o.eps);
  at_least_0("weight_decay", o.weight_decay);
}

template <class Options>
void update(const FlatMoments::Runs& runs, const Options& o, double lr) {
  const auto kernel = [&] {
    if constexpr (kDecoupled<Options>)
      return &at::_ops::_fused_adamw_::call;
    else
      return &at::_ops::_fused_adam_::call;
  }();
  kernel(runs.parameters, runs.gradients, runs.exp_avgs, runs.exp_avg_sqs, /*max_exp_avg_sqs=*/{}, runs.steps, lr, o.beta1, o.beta2,
         o.weight_decay, o.eps, /*amsgrad=*/false, /*maximize=*/false, /*grad_scale=*/{}, /*found_inf=*/{});
}

}  // namespace

template <class Options>
class FusedAdam<Options>::Impl {
 public:
  Impl(std::shared_ptr<ShardedModel> model, std::vector<ParameterGroup<Options>> groups)
      : views_(std::move(model)), groups_(std::move(groups)) {
    for (const auto& group : groups_) check(group.options);
    std::vector<size_t> taken(groups_.size(), 0);
    for (size_t f = 0; f < views_.groups().size(); ++f) {
      const auto& flat = views_.groups()[f];
      std::vector<std::vector<size_t>> members(groups_.size());
      for (size_t p = 0; p < flat.parameters.size(); ++p) {
        const size_t g = group_of(flat.parameters[p].name);
        if (g == groups_.size()) continue;
        members[g].push_back(p);
        ++taken[g];
      }
      for (size_t g = 0; g < groups_.size(); ++g)
        if (!members[g].empty()) parts_.push_back({f, g, FlatMoments(flat, members[g])});
    }
    for (size_t g = 0; g < groups_.size(); ++g)
      TORCH_CHECK(taken[g] > 0 || !groups_[g].parameters, kName<Options>, ": parameter group ", g,
                  " takes none of the model's parameters: its function returned false for every name, or earlier groups have taken them. "
                  "Names are those of the unwrapped model, as in model.named_parameters()");
  }

  void step() {
    views_.settle((std::string(kName<Options>) + "::step()").c_str());
    c10::AutoGradMode no_grad(false);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    WithoutAccessHook no_hook;
    RECORD_FUNCTION(kName<Options>, {});
    for (auto& [flat, group, moments] : parts_) {
      const auto& options = groups_[group].options;
      const auto& runs = moments.begin_step();
      if (!runs.parameters.empty()) update(runs, options, options.lr * lr_factor_);
      views_.were_written(flat, moments.end_step());
    }
  }

  void zero_grad() {
    for (auto& part : parts_) part.moments.zero_grad();
  }

  std::vector<AdamState> state() const {
    std::vector<AdamState> states;
    for (const auto& part : parts_) part.moments.add_state(states);
    return states;
  }

  std::vector<AdamState> restore(const std::map<std::string, int64_t>& steps) {
    std::set<std::string> own;
    for (const auto& part : parts_) part.moments.add_names(own);
    for (const auto& [name, step] : steps) {
      TORCH_CHECK(own.contains(name), kName<Options>, "::restore: '", name, "' is none of this optimizer's parameters");
      TORCH_CHECK(step >= 1, kName<Options>, "::restore: the step of '", name, "' must be at least 1, got ", step);
    }
    for (auto& part : parts_) part.moments.restore(steps);
    return state();
  }

  std::vector<ParameterGroup<Options>>& groups() { return groups_; }
  double lr_factor_ = 1;

 private:
  struct Part {
    size_t flat, group;  // indices
    FlatMoments moments;
  };

  size_t group_of(const std::string& name) const {
    size_t g = 0;
    while (g < groups_.size() && groups_[g].parameters && !groups_[g].parameters(name)) ++g;
    return g;
  }

  FlatViews views_;
  std::vector<ParameterGroup<Options>> groups_;
  std::vector<Part> parts_;  // in plan order
};

template <class Options>
FusedAdam<Options>::FusedAdam(std::shared_ptr<ShardedModel> model, std::vector<ParameterGroup<Options>> groups)
    : impl_(std::make_unique<Impl>(std::move(model), std::move(groups))) {}
template <class Options>
FusedAdam<Options>::~FusedAdam() = default;
template <class Options>
FusedAdam<Options>::FusedAdam(FusedAdam&&) noexcept = default;
template <class Options>
FusedAdam<Options>& FusedAdam<Options>::operator=(FusedAdam&&) noexcept = default;
template <class Options>
void FusedAdam<Options>::step() {
  impl_->step();
}
template <class Options>
void FusedAdam<Options>::zero_grad() {
  impl_->zero_grad();
}
template <class Options>
Options& FusedAdam<Options>::options(size_t group) {
  TORCH_CHECK(group < groups(), kName<Options>, ": there is no parameter group ", group, "; there are ", groups());
  return impl_->groups()[group].options;
}
template <class Options>
size_t FusedAdam<Options>::groups() const {
  return impl_->groups().size();
}
template <class Options>
void FusedAdam<Options>::set_lr_factor(double factor) {
  TORCH_CHECK(factor >= 0, kName<Options>, ": a learning rate's factor must be at least 0, got ", factor);
  impl_->lr_factor_ = factor;
}
template <class Options>
double FusedAdam<Options>::lr_factor() const {
  return impl_->lr_factor_;
}
template <class Options>
std::vector<AdamState> FusedAdam<Options>::state() const {
  return impl_->state();
}

template <class Options>
std::vector<AdamState> FusedAdam<Options>::restore(const std::map<std::string, int64_t>& steps) {
  return impl_->restore(steps);
}

template class FusedAdam<AdamWOptions>;
template class FusedAdam<AdamOptions>;

}  // namespace fsdp
