// No class at all: a bare Sequential with Functional, dropout and normalisation.
#pragma once

#include <torch/torch.h>

namespace models {

inline std::shared_ptr<torch::nn::SequentialImpl> make_sequential_classifier() {
  torch::nn::Sequential net({
      {"conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).stride(2).bias(false))},
      {"norm", torch::nn::BatchNorm2d(4)},
      {"act", torch::nn::Functional(torch::relu)},
      {"pool", torch::nn::AdaptiveAvgPool2d(torch::nn::AdaptiveAvgPool2dOptions({2, 2}))},
      {"flatten", torch::nn::Flatten()},
      {"drop", torch::nn::Dropout(0.25)},
      {"fc", torch::nn::Linear(16, 5)},
      {"clamp",
       torch::nn::Functional(torch::nn::functional::hardtanh, torch::nn::functional::HardtanhFuncOptions().max_val(4).min_val(-4))},
      {"log_softmax", torch::nn::Functional([](torch::Tensor x) { return torch::log_softmax(x, 1); })},
  });
  return net.ptr();
}

}  // namespace models
