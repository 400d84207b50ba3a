#include "tools/train_optimizer.h"

#include <algorithm>
#include <type_traits>
#include <utility>

namespace fsdp::tools {
namespace {

using Variant = std::variant<AdamW, Adam, torch::optim::SGD>;

ParameterPredicate name_contains_any(const std::vector<std::string>& patterns) {
  return [patterns](std::string_view name) {
    return std::any_of(patterns.begin(), patterns.end(), [&](const auto& each) { return name.find(each) != std::string_view::npos; });
  };
}

template <class Options>
FusedAdam<Options> make_adam(const FullyShardedBase& model, const OptimizerConfig& config) {
  const Options options{config.lr, config.beta1, config.beta2, config.eps, config.weight_decay};
  if (config.no_decay.empty()) return FusedAdam<Options>(model, options);
  Options without = options;
  without.weight_decay = 0;
  return FusedAdam<Options>(model, {.groups = {{name_contains_any(config.no_decay), without}, {{}, options}}});
}

torch::optim::SGD make_sgd(const FullyShardedBase& model, const OptimizerConfig& config) {
  const auto options = torch::optim::SGDOptions(config.lr).momentum(config.momentum);
  const auto is_without = name_contains_any(config.no_decay);
  std::vector<at::Tensor> with, without;
  for (const auto& item : model.named_parameters()) (is_without(item.key()) ? without : with).push_back(item.value());
  std::vector<torch::optim::OptimizerParamGroup> groups;
  const auto add = [&](std::vector<at::Tensor>& parameters, double decay) {
    if (!parameters.empty())
      groups.emplace_back(std::move(parameters),
                          std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(options).weight_decay(decay)));
  };
  add(with, config.weight_decay);
  add(without, 0);
  return torch::optim::SGD(groups, options);
}

Variant make(const FullyShardedBase& model, const OptimizerConfig& config) {
  switch (config.type) {
    case OptimizerType::ADAMW:
      return make_adam<AdamWOptions>(model, config);
    case OptimizerType::ADAM:
      return make_adam<AdamOptions>(model, config);
    case OptimizerType::SGD:
      return make_sgd(model, config);
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace

TrainOptimizer::TrainOptimizer(const FullyShardedBase& model, const TrainConfig& config)
    : optimizer_(make(model, config.optimizer)), scale_config_(config.loss_scale), hysteresis_left_(config.loss_scale.hysteresis) {
  if (config.dtype != ComputeDtype::FP16) return;
  // Half of the least, since hold_scale() may take the last step down back.
  scaler_.emplace(model, GradScalerOptions{.init_scale = scale_config_.init_scale,
                                           .growth_interval = scale_config_.growth_interval,
                                           .min_scale = (scale_config_.dynamic ? scale_config_.min_scale : scale_config_.init_scale) / 2});
}

void TrainOptimizer::unscale() {
  if (scaler_) scaler_->unscale_();
}

void TrainOptimizer::step(double lr) {
  std::visit(
      [&](auto& optimizer) {
        if constexpr (std::is_same_v<std::decay_t<decltype(optimizer)>, torch::optim::SGD>) {
          for (auto& group : optimizer.param_groups()) static_cast<torch::optim::SGDOptions&>(group.options()).lr(lr);
        } else {
          for (size_t group = 0; group < optimizer.groups(); ++group) optimizer.options(group).lr = lr;
        }
        scaler_ ? static_cast<void>(scaler_->step(optimizer)) : static_cast<void>(optimizer.step());
      },
      optimizer_);
  if (!scaler_) return;
  const double before = scaler_->get_scale();
  scaler_->update();
  hold_scale(before);
}

CheckpointOptimizer TrainOptimizer::checkpointed() {
  return std::visit([](auto& optimizer) { return CheckpointOptimizer(optimizer); }, optimizer_);
}

nlohmann::json TrainOptimizer::state() const {
  if (!scaler_) return nullptr;
  const auto state = scaler_->state();
  return {{"scale", state.scale},
          {"growth_tracker", state.growth_tracker},
          {"skipped_steps", state.skipped_steps},
          {"skips_in_a_row", state.skips_in_a_row},
          {"hysteresis_left", hysteresis_left_}};
}

void TrainOptimizer::load_state(const nlohmann::json& state) {
  if (!scaler_ || state.is_null()) return;
  scaler_->load_state({state.at("scale"), state.at("growth_tracker"), state.at("skipped_steps"), state.at("skips_in_a_row")});
  hysteresis_left_ = state.at("hysteresis_left");
}

// A fixed scale stays, and a shrinking one waits for as many overflows as DeepSpeed's hysteresis says.
void TrainOptimizer::hold_scale(double before) {
  auto state = scaler_->state();
  if (state.scale > before) hysteresis_left_ = scale_config_.hysteresis;
  const bool waits = state.scale < before && hysteresis_left_ > 1;
  if (waits) --hysteresis_left_;
  if (scale_config_.dynamic && !waits) {
    TORCH_CHECK(state.scale >= scale_config_.min_scale,
                "gradients overflow in fp16 at every loss scale down to fp16.min_loss_scale = ", scale_config_.min_scale,
                "; lower the learning rate, clip gradients, or use bf16");
    return;
  }
  state.scale = before;
  scaler_->load_state(state);
}

}  // namespace fsdp::tools
