// Sharing: one encoder registered under two names and used three times, and a branch that only every other step uses.
#pragma once

#include <torch/torch.h>

namespace models {

class SiameseImpl : public torch::nn::Module {
 public:
  SiameseImpl() {
    left = register_module("left", torch::nn::Sequential(torch::nn::Linear(6, 8), torch::nn::GELU(), torch::nn::Linear(8, 6)));
    right = register_module("right", left);
    const torch::OrderedDict<std::string, std::shared_ptr<torch::nn::Module>> branches(
        {{"even", torch::nn::Linear(6, 3).ptr()}, {"always", torch::nn::Linear(6, 3).ptr()}});
    auxiliary = register_module("auxiliary", torch::nn::ModuleDict(branches));
  }
  torch::Tensor forward(torch::Tensor a, torch::Tensor b, bool with_even_branch = true) {
    const auto one = left->forward(a), two = right->forward(b);
    auto distance = (one - two).square().sum(-1) + left->forward(one).mean(-1);
    distance = distance + auxiliary["always"]->as<torch::nn::Linear>()->forward(one).mean(-1);
    if (with_even_branch) distance = distance + auxiliary["even"]->as<torch::nn::Linear>()->forward(two).square().mean(-1);
    return distance;
  }

 private:
  torch::nn::Sequential left{nullptr}, right{nullptr};
  torch::nn::ModuleDict auxiliary{nullptr};
};
TORCH_MODULE(Siamese);

}  // namespace models
