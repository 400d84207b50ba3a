// The decoder of GPT-2: LayerNorm, learned positions, one projection for queries, keys and values.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/normalization.h>

#include "models/causal_lm.h"

namespace fsdp::models {

// A linear map whose matrix is (in, out), the other way round than nn::Linear's: so GPT-2's files have it.
class FanInLinearImpl : public torch::nn::Module {
 public:
  FanInLinearImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x);

 private:
  at::Tensor weight_, bias_;
};
TORCH_MODULE(FanInLinear);

class Gpt2AttentionImpl : public torch::nn::Module {
 public:
  explicit Gpt2AttentionImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  ModelConfig config_;
  FanInLinear c_attn_, c_proj_;
};
TORCH_MODULE(Gpt2Attention);

class Gpt2MlpImpl : public torch::nn::Module {
 public:
  explicit Gpt2MlpImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  ModelConfig config_;
  FanInLinear c_fc_, c_proj_;
};
TORCH_MODULE(Gpt2Mlp);

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  explicit Gpt2BlockImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  torch::nn::LayerNorm ln_1_, ln_2_;
  Gpt2Attention attn_;
  Gpt2Mlp mlp_;
};
TORCH_MODULE(Gpt2Block);

class Gpt2Decoder : public Backbone {
 public:
  explicit Gpt2Decoder(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& ids) override;
  at::Tensor embedding() override { return wte_->weight; }

 private:
  ModelConfig config_;
  torch::nn::Embedding wte_, wpe_;
  torch::nn::ModuleList h_;
  torch::nn::LayerNorm ln_f_;
};

}  // namespace fsdp::models
