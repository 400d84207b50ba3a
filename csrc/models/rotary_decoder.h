// The decoder of Llama and Qwen2: RMSNorm, rotary positions, grouped-query attention, a gated feed-forward part.
#pragma once

#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include "models/causal_lm.h"

namespace fsdp::models {

class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t size, double eps);
  at::Tensor forward(const at::Tensor& x);  // normalised in fp32

 private:
  at::Tensor weight_;
  double eps_;
};
TORCH_MODULE(RmsNorm);

// Cosines and sines of the positions' angles, (T, head_dim) each, the second half of a row equal to the first.
struct Rotation {
  at::Tensor cos, sin;
};

class RotaryAttentionImpl : public torch::nn::Module {
 public:
  explicit RotaryAttentionImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotation& rotation);

 private:
  ModelConfig config_;
  torch::nn::Linear q_proj_, k_proj_, v_proj_, o_proj_;
};
TORCH_MODULE(RotaryAttention);

class GatedMlpImpl : public torch::nn::Module {
 public:
  explicit GatedMlpImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  Activation activation_;
  torch::nn::Linear gate_proj_, up_proj_, down_proj_;
};
TORCH_MODULE(GatedMlp);

class RotaryBlockImpl : public torch::nn::Module {
 public:
  explicit RotaryBlockImpl(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& x, const Rotation& rotation);

 private:
  RmsNorm input_layernorm_, post_attention_layernorm_;
  RotaryAttention self_attn_;
  GatedMlp mlp_;
};
TORCH_MODULE(RotaryBlock);

class RotaryDecoder : public Backbone {
 public:
  explicit RotaryDecoder(const ModelConfig& config);
  at::Tensor forward(const at::Tensor& ids) override;
  at::Tensor embedding() override { return embed_tokens_->weight; }

 private:
  ModelConfig config_;
  torch::nn::Embedding embed_tokens_;
  torch::nn::ModuleList layers_;
  RmsNorm norm_;
};

}  // namespace fsdp::models
