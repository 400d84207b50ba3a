// Message passing over a graph with an unregistered helper, a GRU called once a round, AnyModule, an optional result, and sampling.
#pragma once

#include <torch/torch.h>

#include <map>
#include <optional>
#include <string>

namespace models {

struct GraphBatch {
  torch::Tensor nodes;                         // (n, width)
  torch::Tensor from, to;                      // (edges)
  std::map<std::string, torch::Tensor> extra;  // "target": (n)
};

struct GraphNet : torch::nn::Module {
  explicit GraphNet(int64_t width, int64_t rounds = 3) : rounds_(rounds) {
    message_ = torch::nn::AnyModule(torch::nn::Linear(2 * width, width));
    register_module("message", message_.ptr());
    update_ = register_module("update", torch::nn::GRU(torch::nn::GRUOptions(width, width)));
    norm_ = register_module("norm", torch::nn::GroupNorm(torch::nn::GroupNormOptions(2, width)));
    readout_ = register_module("readout", torch::nn::Bilinear(width, width, 1));
    temperature_ = register_parameter("temperature", torch::tensor(1.0));
  }

  std::optional<torch::Tensor> forward(const GraphBatch& batch, bool logits_only = false) {
    auto state = embed(batch);
    auto logits = readout_->forward(state, batch.nodes).squeeze(-1) / temperature_;
    if (logits_only) return logits;
    const auto target = batch.extra.find("target");
    if (target == batch.extra.end()) return std::nullopt;
    return torch::binary_cross_entropy_with_logits(logits, target->second);
  }

  torch::Tensor sample(const GraphBatch& batch) {
    torch::NoGradGuard no_grad;
    return torch::bernoulli(torch::sigmoid(*forward(batch, /*logits_only=*/true)));
  }

 private:
  torch::Tensor embed(const GraphBatch& batch) {
    auto state = batch.nodes;
    for (int64_t round = 0; round < rounds_; ++round) {
      const auto pairs = torch::cat({state.index_select(0, batch.from), state.index_select(0, batch.to)}, 1);
      const auto messages = torch::relu(message_.forward(pairs));
      const auto sums = torch::zeros_like(state).index_add(0, batch.to, messages);
      auto [output, hidden] = update_->forward(sums.unsqueeze(0), state.unsqueeze(0));
      state = norm_->forward(output.squeeze(0));
    }
    return state;
  }

  torch::nn::AnyModule message_;
  torch::nn::GRU update_{nullptr};
  torch::nn::GroupNorm norm_{nullptr};
  torch::nn::Bilinear readout_{nullptr};
  torch::Tensor temperature_;
  int64_t rounds_;
};

}  // namespace models
