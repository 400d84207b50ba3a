// Reinforcement learning: a shared_ptr without a holder, a shared body, act() and evaluate() with tuples, and no forward of interest.
#pragma once

#include <torch/torch.h>

#include <tuple>

namespace models {

class ActorCritic : public torch::nn::Module {
 public:
  ActorCritic(int64_t observations, int64_t actions, int64_t hidden = 16) {
    body_ = register_module("body", torch::nn::Sequential(torch::nn::Linear(observations, hidden), torch::nn::Tanh(),
                                                          torch::nn::Linear(hidden, hidden), torch::nn::Tanh()));
    mean_ = register_module("mean", torch::nn::Linear(hidden, actions));
    value_ = register_module("value", torch::nn::Linear(hidden, 1));
    log_deviation_ = register_parameter("log_deviation", torch::full({actions}, -0.5));
    for (auto& parameter : named_parameters(/*recurse=*/true))
      if (parameter.key().find("bias") != std::string::npos) torch::nn::init::constant_(parameter.value(), 0.01);
  }

  // Action and its log-probability; no gradients.
  std::tuple<torch::Tensor, torch::Tensor> act(const torch::Tensor& observation) {
    torch::NoGradGuard no_grad;
    const auto mean = mean_->forward(body_->forward(observation));
    const auto action = is_training() ? mean + log_deviation_.exp() * torch::randn_like(mean) : mean;
    return {action, log_probability(mean, action)};
  }

  // Log-probability, entropy and value of given actions.
  std::tuple<torch::Tensor, torch::Tensor, torch::Tensor> evaluate(const torch::Tensor& observation, const torch::Tensor& action) {
    const auto features = body_->forward(observation);
    const auto entropy = (log_deviation_ + 0.5 * std::log(2 * M_PI * M_E)).sum();
    return {log_probability(mean_->forward(features), action), entropy, value_->forward(features).squeeze(-1)};
  }

 private:
  torch::Tensor log_probability(const torch::Tensor& mean, const torch::Tensor& action) {
    const auto scaled = (action - mean) / log_deviation_.exp();
    return -(0.5 * scaled.square() + log_deviation_ + 0.5 * std::log(2 * M_PI)).sum(-1);
  }

  torch::nn::Sequential body_{nullptr};
  torch::nn::Linear mean_{nullptr}, value_{nullptr};
  torch::Tensor log_deviation_;
};

// One PPO update on a rollout that the policy itself makes.
inline torch::Tensor ppo_loss(ActorCritic& policy, const torch::Tensor& observations) {
  const auto [actions, old_log_probability] = policy.act(observations);
  const auto returns = observations.sum(-1);
  const auto [log_probability, entropy, values] = policy.evaluate(observations, actions);
  const auto advantage = (returns - values).detach();
  const auto ratio = (log_probability - old_log_probability).exp();
  const auto surrogate = torch::min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage);
  return -surrogate.mean() + 0.5 * (returns - values).square().mean() - 0.01 * entropy;
}

}  // namespace models
