#include "models/gpt2_decoder.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/zeros.h>

#include "models/attention.h"

namespace fsdp::models {
namespace {

torch::nn::LayerNorm norm(const ModelConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.hidden_size}).eps(config.norm_eps));
}

}  // namespace

FanInLinearImpl::FanInLinearImpl(int64_t in, int64_t out)
    : weight_(register_parameter("weight", at::zeros({in, out}))), bias_(register_parameter("bias", at::zeros({out}))) {}

at::Tensor FanInLinearImpl::forward(const at::Tensor& x) {
  auto sizes = x.sizes().vec();
  sizes.back() = weight_.size(1);
  return at::addmm(bias_, x.reshape({-1, x.size(-1)}), weight_).view(sizes);
}

Gpt2AttentionImpl::Gpt2AttentionImpl(const ModelConfig& config)
    : config_(config),
      c_attn_(register_module("c_attn", FanInLinear(config.hidden_size, 3 * config.hidden_size))),
      c_proj_(register_module("c_proj", FanInLinear(config.hidden_size, config.hidden_size))) {}

at::Tensor Gpt2AttentionImpl::forward(const at::Tensor& x) {
  const auto parts = c_attn_->forward(x).view({x.size(0), x.size(1), 3, config_.heads, config_.head_dim}).unbind(2);
  const auto mixed = causal_attention(parts[0], parts[1], parts[2], is_training() ? config_.attention_dropout : 0);
  return at::dropout(c_proj_->forward(mixed), config_.residual_dropout, is_training());
}

Gpt2MlpImpl::Gpt2MlpImpl(const ModelConfig& config)
    : config_(config),
      c_fc_(register_module("c_fc", FanInLinear(config.hidden_size, config.intermediate_size))),
      c_proj_(register_module("c_proj", FanInLinear(config.intermediate_size, config.hidden_size))) {}

at::Tensor Gpt2MlpImpl::forward(const at::Tensor& x) {
  const auto y = c_proj_->forward(activate(config_.activation, c_fc_->forward(x)));
  return at::dropout(y, config_.residual_dropout, is_training());
}

Gpt2BlockImpl::Gpt2BlockImpl(const ModelConfig& config)
    : ln_1_(register_module("ln_1", norm(config))),
      ln_2_(register_module("ln_2", norm(config))),
      attn_(register_module("attn", Gpt2Attention(config))),
      mlp_(register_module("mlp", Gpt2Mlp(config))) {}

at::Tensor Gpt2BlockImpl::forward(const at::Tensor& x) {
  const auto attended = x + attn_->forward(ln_1_->forward(x));
  return attended + mlp_->forward(ln_2_->forward(attended));
}

Gpt2Decoder::Gpt2Decoder(const ModelConfig& config)
    : config_(config),
      wte_(register_module("wte", torch::nn::Embedding(config.vocab_size, config.hidden_size))),
      wpe_(register_module("wpe", torch::nn::Embedding(config.max_positions, config.hidden_size))),
      h_(register_module("h", torch::nn::ModuleList())),
      ln_f_(register_module("ln_f", norm(config))) {
  for (int64_t i = 0; i < config.layers; ++i) h_->push_back(Gpt2Block(config));
}

at::Tensor Gpt2Decoder::forward(const at::Tensor& ids) {
  const int64_t length = ids.size(1);
  TORCH_CHECK(length <= config_.max_positions, "a row of ", length, " tokens for a model of ", config_.max_positions,
              " positions (n_positions)");
  auto x = wte_->forward(ids) + wpe_->forward(at::arange(length, ids.options()));
  x = at::dropout(x, config_.embedding_dropout, is_training());
  for (const auto& block : *h_) x = block->as<Gpt2BlockImpl>()->forward(x);
  return ln_f_->forward(x);
}

}  // namespace fsdp::models
