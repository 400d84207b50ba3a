// A model whose gradients are what the test says, in units of all sizes.
#pragma once

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <vector>

namespace fsdp::testing {

struct BagImpl : torch::nn::Module {
  BagImpl(const std::vector<std::vector<int64_t>>& shapes, torch::Dtype dtype) {
    for (size_t i = 0; i < shapes.size(); ++i) register_parameter("p" + std::to_string(i), torch::ones(shapes[i], dtype));
  }
};

// Over 4 ranks: shards that cut through parameters, shards of padding, and ranks whose shard of a unit holds nothing.
struct BagsImpl : torch::nn::Module {
  explicit BagsImpl(torch::Dtype of_second = torch::kFloat) {
    register_module("large", std::make_shared<BagImpl>(std::vector<std::vector<int64_t>>{{7, 5}, {3}, {0, 8}, {33}}, torch::kFloat));
    register_module("second", std::make_shared<BagImpl>(std::vector<std::vector<int64_t>>{{9}, {5, 2}}, of_second));
    register_module("tiny", std::make_shared<BagImpl>(std::vector<std::vector<int64_t>>{{2}}, torch::kFloat));
    register_parameter("own", torch::ones({6}));
  }
  // The gradient of parameter i becomes gradients[i]; undefined: none.
  torch::Tensor forward(const std::vector<torch::Tensor>& gradients) {
    auto sum = torch::zeros({}, torch::kFloat);
    const auto all = parameters();
    for (size_t i = 0; i < all.size(); ++i)
      if (gradients[i].defined()) sum = sum + (all[i] * gradients[i]).sum();
    return sum;
  }
};

inline WrapPolicy one_unit_per_bag() { return module_wrap_policy<BagImpl>(); }

// Random ones, each of a size of its own between 1e-3 and 1e3, other on every rank.
inline std::vector<torch::Tensor> random_gradients(int rank, torch::Dtype of_second = torch::kFloat, int step = 0) {
  torch::manual_seed(1000 + 10 * step + rank);
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : BagsImpl(of_second).parameters()) {
    const auto size = torch::pow(10, torch::rand(parameter.sizes()) * 6 - 3);
    gradients.push_back((torch::randn(parameter.sizes()) * size).to(parameter.scalar_type()));
  }
  return gradients;
}

// Writes one element of this rank's part of a gradient; returns whether it has one.
inline bool put_into_gradient(const torch::Tensor& parameter, double value) {
  const auto& slice = parameter.grad();
  if (!slice.defined() || slice.numel() == 0) return false;
  torch::NoGradGuard no_grad;
  torch::from_blob(slice.data_ptr(), {slice.numel()}, torch::dtype(slice.scalar_type())).narrow(0, slice.numel() / 2, 1).fill_(value);
  return true;
}

}  // namespace fsdp::testing
