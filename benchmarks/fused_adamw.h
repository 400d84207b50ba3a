// AdamW as one call for all parameters, what the peers' torch.optim.AdamW(fused=True) does: the same kernel of LibTorch, on this rank's
// slices.
#pragma once

#include <ATen/ops/_fused_adamw.h>
#include <torch/torch.h>

#include <vector>

namespace benchmark {

class FusedAdamW {
 public:
  FusedAdamW(std::vector<torch::Tensor> parameters, double lr, double weight_decay)
      : parameters_(std::move(parameters)), lr_(lr), weight_decay_(weight_decay) {
    for (const auto& parameter : parameters_) {
      first_.push_back(torch::zeros({parameter.numel()}));
      second_.push_back(torch::zeros({parameter.numel()}));
      steps_.push_back(torch::zeros({}));
    }
  }

  void step() {
    const torch::NoGradGuard no_grad;
    std::vector<torch::Tensor> parameters, gradients, first, second, steps;
    for (size_t i = 0; i < parameters_.size(); ++i) {
      if (!parameters_[i].grad().defined() || parameters_[i].numel() == 0) continue;
      parameters.push_back(parameters_[i]);
      gradients.push_back(parameters_[i].grad());
      first.push_back(first_[i]);
      second.push_back(second_[i]);
      steps.push_back(steps_[i].add_(1));
    }
    at::_fused_adamw_(parameters, gradients, first, second, /*max_exp_avg_sqs=*/{}, steps, lr_, /*beta1=*/0.9, /*beta2=*/0.999,
                      weight_decay_,
                      /*eps=*/1e-8, /*amsgrad=*/false, /*maximize=*/false);
  }

  void zero_grad() {
    for (auto& parameter : parameters_) parameter.mutable_grad().reset();
  }

 private:
  std::vector<torch::Tensor> parameters_, first_, second_, steps_;  // moments have their slice's size
  double lr_, weight_decay_;
};

}  // namespace benchmark
