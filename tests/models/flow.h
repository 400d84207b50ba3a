// A normalising flow that writes to its own parameters: ActNorm initialises itself from the first batch, and masked layers multiply
// their mask into the weight before they use it.
#pragma once

#include <torch/torch.h>

namespace models {

struct ActNormImpl : torch::nn::Module {
  explicit ActNormImpl(int64_t features) {
    log_scale = register_parameter("log_scale", torch::zeros({features}));
    shift = register_parameter("shift", torch::zeros({features}));
    initialised = register_buffer("initialised", torch::zeros({}, torch::kBool));
  }
  std::pair<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    if (!initialised.item<bool>()) {
      torch::NoGradGuard no_grad;
      shift.data().copy_(-x.mean(0));
      log_scale.copy_(-torch::log(x.std(0) + 1e-6));
      initialised.fill_(true);
    }
    return {(x + shift) * log_scale.exp(), log_scale.sum()};
  }
  torch::Tensor log_scale, shift, initialised;
};
TORCH_MODULE(ActNorm);

// Weights above the diagonal are kept at zero by writing the mask into them.
struct MaskedLinearImpl : torch::nn::LinearImpl {
  MaskedLinearImpl(int64_t in, int64_t out, bool strictly) : LinearImpl(in, out) {
    mask = register_buffer("mask", torch::ones({out, in}).tril(strictly ? -1 : 0));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    {
      torch::NoGradGuard no_grad;
      weight.mul_(mask);
    }
    return LinearImpl::forward(x);
  }
  torch::Tensor mask;
};
TORCH_MODULE(MaskedLinear);

struct FlowImpl : torch::nn::Module {
  FlowImpl(int64_t features, int64_t depth) {
    steps = register_module("steps", torch::nn::ModuleList());
    for (int64_t i = 0; i < depth; ++i) {
      steps->push_back(ActNorm(features));
      steps->push_back(MaskedLinear(features, 2 * features, /*strictly=*/true));
    }
  }
  // z and log |det|.
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x) {
    auto log_det = torch::zeros({x.size(0)});
    for (size_t i = 0; i < steps->size(); i += 2) {
      auto [normalised, det] = steps->ptr<ActNormImpl>(i)->forward(x);
      const auto both = steps->ptr<MaskedLinearImpl>(i + 1)->forward(normalised).chunk(2, -1);
      const auto log_scale = torch::tanh(both[0]);
      x = (normalised * log_scale.exp() + both[1]).flip(-1);
      log_det = log_det + det + log_scale.sum(-1);
    }
    return {x, log_det};
  }
  torch::nn::ModuleList steps{nullptr};
};
TORCH_MODULE(Flow);

inline torch::Tensor negative_log_likelihood(FlowImpl& flow, const torch::Tensor& x) {
  const auto [z, log_det] = flow.forward(x);
  return (0.5 * z.square().sum(-1) - log_det).mean();
}

}  // namespace models
