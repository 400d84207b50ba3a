// Residual blocks with BatchNorm, a hand-written spectral norm whose buffer is written in forward, and a running average of activations.
#pragma once

#include <torch/torch.h>

#include <utility>

namespace models {

struct ResidualBlockImpl : torch::nn::Module {
  ResidualBlockImpl(int64_t in, int64_t out, int64_t stride = 1)
      : conv1(torch::nn::Conv2dOptions(in, out, 3).stride(stride).padding(1).bias(false)),
        bn1(out),
        conv2(torch::nn::Conv2dOptions(out, out, 3).padding(1).bias(false)),
        bn2(out) {
    register_module("conv1", conv1);
    register_module("bn1", bn1);
    register_module("conv2", conv2);
    register_module("bn2", bn2);
    if (stride != 1 || in != out) {
      downsample = torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 1).stride(stride).bias(false)),
                                         torch::nn::BatchNorm2d(out));
      register_module("downsample", downsample);
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    auto y = torch::relu(bn1(conv1(x)));
    y = bn2(conv2(y));
    return torch::relu(y + (downsample.is_empty() ? x : downsample->forward(x)));
  }
  torch::nn::Conv2d conv1;
  torch::nn::BatchNorm2d bn1;
  torch::nn::Conv2d conv2;
  torch::nn::BatchNorm2d bn2;
  torch::nn::Sequential downsample{nullptr};
};
TORCH_MODULE(ResidualBlock);

// A linear layer divided by its largest singular value, which one step of power iteration per forward tracks in a buffer.
struct SpectralLinearImpl : torch::nn::Module {
  SpectralLinearImpl(int64_t in, int64_t out) {
    weight = register_parameter("weight", torch::randn({out, in}) / std::sqrt(double(in)));
    u = register_buffer("u", torch::nn::functional::normalize(torch::ones({out}), torch::nn::functional::NormalizeFuncOptions().dim(0)));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto unit = torch::nn::functional::NormalizeFuncOptions().dim(0);
    torch::Tensor v;
    {
      torch::NoGradGuard no_grad;
      v = torch::nn::functional::normalize(weight.t().mv(u), unit);
      if (is_training()) u.copy_(torch::nn::functional::normalize(weight.mv(v), unit));
    }
    const auto sigma = torch::dot(u.clone(), weight.mv(v));
    return torch::nn::functional::linear(x, weight / sigma);
  }
  torch::Tensor weight, u;
};
TORCH_MODULE(SpectralLinear);

struct ResidualNetImpl : torch::nn::Module {
  ResidualNetImpl() {
    stem = register_module("stem", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3).padding(1)));
    stages = register_module("stages", torch::nn::Sequential(ResidualBlock(4, 4), ResidualBlock(4, 6, 2)));
    head = register_module("head", SpectralLinear(6, 5));
    mean_activation = register_buffer("mean_activation", torch::zeros({6}));
    batches = register_buffer("batches", torch::zeros({}, torch::kLong));
  }
  // Logits and pooled features.
  std::pair<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    auto features = stages->forward(torch::relu(stem(x))).mean({2, 3});
    if (is_training()) {
      torch::NoGradGuard no_grad;
      mean_activation.mul_(0.9).add_(features.mean(0), 0.1);
      batches += 1;
    }
    return {head(features - mean_activation.clone()), features};
  }
  torch::nn::Conv2d stem{nullptr};
  torch::nn::Sequential stages{nullptr};
  SpectralLinear head{nullptr};
  torch::Tensor mean_activation, batches;
};
TORCH_MODULE(ResidualNet);

}  // namespace models
