#include "models/causal_lm.h"

#include <ATen/ops/linear.h>
#include <torch/utils.h>

#include <cmath>

#include "models/gpt2_decoder.h"
#include "models/rotary_decoder.h"

namespace fsdp::models {

CausalLMImpl::CausalLMImpl(const ModelConfig& config) {
  if (config.architecture == Architecture::GPT2)
    backbone_ = register_module<Backbone>("transformer", std::make_shared<Gpt2Decoder>(config));
  else
    backbone_ = register_module<Backbone>("model", std::make_shared<RotaryDecoder>(config));
  if (!config.tied)
    head_ = register_module("lm_head", torch::nn::Linear(torch::nn::LinearOptions(config.hidden_size, config.vocab_size).bias(false)));
}

at::Tensor CausalLMImpl::forward(const at::Tensor& ids) {
  TORCH_CHECK(ids.dim() == 2 && ids.scalar_type() == at::kLong, "expected ids of shape (rows, tokens) and dtype int64, got ", ids.sizes(),
              " ", ids.scalar_type());
  const auto hidden = backbone_->forward(ids);
  return head_ ? head_->forward(hidden) : at::linear(hidden, backbone_->embedding());
}

CausalLM make_model(const ModelConfig& config) {
  CausalLM model(config);
  torch::NoGradGuard no_grad;
  const double residual = config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (auto& item : model->named_parameters()) {
    const auto& name = item.key();
    if (item->dim() == 1) {
      name.ends_with("bias") ? item->zero_() : item->fill_(1);
    } else {
      const bool writes_residual = config.architecture == Architecture::GPT2 && name.ends_with("c_proj.weight");
      item->normal_(0, writes_residual ? residual : config.initializer_range);
    }
  }
  return model;
}

WrapPolicy block_policy() { return module_wrap_policy<RotaryBlockImpl, Gpt2BlockImpl>(); }

}  // namespace fsdp::models
