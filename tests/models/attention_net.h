// LibTorch's own attention: TransformerEncoder with dropout, and MultiheadAttention with a learned query.
#pragma once

#include <torch/torch.h>

namespace models {

struct AttentionNetImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 8, kHeads = 2;
  explicit AttentionNetImpl(double dropout = 0.1)
      : encoder(torch::nn::TransformerEncoderLayer(
                    torch::nn::TransformerEncoderLayerOptions(kWidth, kHeads).dim_feedforward(16).dropout(dropout)),
                2),
        pooling(torch::nn::MultiheadAttentionOptions(kWidth, kHeads).dropout(dropout)) {
    register_module("encoder", encoder);
    register_module("pooling", pooling);
    query = register_parameter("query", torch::randn({1, 1, kWidth}));
    positions = register_buffer("positions", torch::randn({16, 1, kWidth}));
    head = register_module("head", torch::nn::Linear(kWidth, 4));
  }
  // x: (length, batch, width). Logits, and where the pooling looked.
  std::tuple<torch::Tensor, torch::Tensor> forward(torch::Tensor x, const torch::Tensor& padding = {}) {
    x = encoder->forward(x + positions.slice(0, 0, x.size(0)), /*src_mask=*/{}, padding);
    auto [pooled, weights] = pooling->forward(query.expand({1, x.size(1), kWidth}), x, x, padding);
    return {head->forward(pooled.squeeze(0)), weights};
  }
  torch::nn::TransformerEncoder encoder;
  torch::nn::MultiheadAttention pooling;
  torch::nn::Linear head{nullptr};
  torch::Tensor query, positions;
};
TORCH_MODULE(AttentionNet);

}  // namespace models
