#include "models/rotary_decoder.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/outer.h>
#include <ATen/ops/pow.h>
#include <ATen/ops/rsqrt.h>

#include "models/attention.h"

namespace fsdp::models {
namespace {

torch::nn::Linear linear(int64_t in, int64_t out, bool bias) { return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(bias)); }

// x (B, T, heads, D): each pair (i, i + D/2) is turned by its position's angle.
at::Tensor rotate(const at::Tensor& x, const Rotation& rotation) {
  const auto halves = x.chunk(2, -1);
  const auto turned = at::cat({-halves[1], halves[0]}, -1);
  return x * rotation.cos.unsqueeze(1) + turned * rotation.sin.unsqueeze(1);
}

// In fp32 whatever the model computes in: angles of far positions have no precision to lose.
Rotation make_rotation(const ModelConfig& config, const at::Tensor& like, int64_t length) {
  const auto options = like.options().dtype(at::kFloat).requires_grad(false);
  const auto exponents = at::arange(0, config.head_dim, 2, options) / static_cast<double>(config.head_dim);
  const auto frequencies = 1.0 / at::pow(config.rope_theta, exponents);
  const auto half = at::outer(at::arange(length, options), frequencies);
  const auto angles = at::cat({half, half}, -1);
  return {angles.cos().to(like.scalar_type()), angles.sin().to(like.scalar_type())};
}

}  // namespace

RmsNormImpl::RmsNormImpl(int64_t size, double eps) : weight_(register_parameter("weight", at::ones({size}))), eps_(eps) {}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) {
  const auto wide = x.to(at::kFloat);
  return weight_ * (wide * at::rsqrt(wide.pow(2).mean(-1, true) + eps_)).to(x.scalar_type());
}

RotaryAttentionImpl::RotaryAttentionImpl(const ModelConfig& config)
    : config_(config),
      q_proj_(register_module("q_proj", linear(config.hidden_size, config.heads * config.head_dim, config.qkv_bias))),
      k_proj_(register_module("k_proj", linear(config.hidden_size, config.kv_heads * config.head_dim, config.qkv_bias))),
      v_proj_(register_module("v_proj", linear(config.hidden_size, config.kv_heads * config.head_dim, config.qkv_bias))),
      o_proj_(register_module("o_proj", linear(config.heads * config.head_dim, config.hidden_size, config.output_bias))) {}

at::Tensor RotaryAttentionImpl::forward(const at::Tensor& x, const Rotation& rotation) {
  const auto by_head = [&](const at::Tensor& y, int64_t heads) { return y.view({x.size(0), x.size(1), heads, config_.head_dim}); };
  const auto query = rotate(by_head(q_proj_->forward(x), config_.heads), rotation);
  const auto key = rotate(by_head(k_proj_->forward(x), config_.kv_heads), rotation);
  const auto value = by_head(v_proj_->forward(x), config_.kv_heads);
  return o_proj_->forward(causal_attention(query, key, value, is_training() ? config_.attention_dropout : 0));
}

GatedMlpImpl::GatedMlpImpl(const ModelConfig& config)
    : activation_(config.activation),
      gate_proj_(register_module("gate_proj", linear(config.hidden_size, config.intermediate_size, config.mlp_bias))),
      up_proj_(register_module("up_proj", linear(config.hidden_size, config.intermediate_size, config.mlp_bias))),
      down_proj_(register_module("down_proj", linear(config.intermediate_size, config.hidden_size, config.mlp_bias))) {}

at::Tensor GatedMlpImpl::forward(const at::Tensor& x) {
  return down_proj_->forward(activate(activation_, gate_proj_->forward(x)) * up_proj_->forward(x));
}

RotaryBlockImpl::RotaryBlockImpl(const ModelConfig& config)
    : input_layernorm_(register_module("input_layernorm", RmsNorm(config.hidden_size, config.norm_eps))),
      post_attention_layernorm_(register_module("post_attention_layernorm", RmsNorm(config.hidden_size, config.norm_eps))),
      self_attn_(register_module("self_attn", RotaryAttention(config))),
      mlp_(register_module("mlp", GatedMlp(config))) {}

at::Tensor RotaryBlockImpl::forward(const at::Tensor& x, const Rotation& rotation) {
  const auto attended = x + self_attn_->forward(input_layernorm_->forward(x), rotation);
  return attended + mlp_->forward(post_attention_layernorm_->forward(attended));
}

RotaryDecoder::RotaryDecoder(const ModelConfig& config)
    : config_(config),
      embed_tokens_(register_module("embed_tokens", torch::nn::Embedding(config.vocab_size, config.hidden_size))),
      layers_(register_module("layers", torch::nn::ModuleList())),
      norm_(register_module("norm", RmsNorm(config.hidden_size, config.norm_eps))) {
  for (int64_t i = 0; i < config.layers; ++i) layers_->push_back(RotaryBlock(config));
}

at::Tensor RotaryDecoder::forward(const at::Tensor& ids) {
  auto x = embed_tokens_->forward(ids);
  const auto rotation = make_rotation(config_, x, ids.size(1));
  for (const auto& layer : *layers_) x = layer->as<RotaryBlockImpl>()->forward(x, rotation);
  return norm_->forward(x);
}

}  // namespace fsdp::models
