// Decoders for language models with the parameter names of Hugging Face's files, written as any LibTorch module is.
//
//     auto net = fsdp::models::make_model(fsdp::models::load_config(folder));
//     fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::models::block_policy()});
//     auto logits = model(ids);
#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/wrap_policy.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include "models/model_config.h"

namespace fsdp::models {

// From ids to the last hidden states, and the matrix that turned ids into the first ones.
class Backbone : public torch::nn::Module {
 public:
  virtual at::Tensor forward(const at::Tensor& ids) = 0;  // (B, T) int64 -> (B, T, hidden_size)
  virtual at::Tensor embedding() = 0;                     // (vocab_size, hidden_size)
};

class CausalLMImpl : public torch::nn::Module {
 public:
  explicit CausalLMImpl(const ModelConfig& config);

  // ids (B, T) int64 below vocab_size; returns logits (B, T, vocab_size). Position t sees ids 0 to t. Throws c10::Error for other shapes,
  // and where T is above GPT-2's number of positions.
  at::Tensor forward(const at::Tensor& ids);

 private:
  std::shared_ptr<Backbone> backbone_;
  torch::nn::Linear head_{nullptr};  // none where tied
};
TORCH_MODULE(CausalLM);

// Initialised for training from scratch with LibTorch's generator: matrices normal with initializer_range (those that write into the
// residual stream of a GPT-2 by sqrt(2 · layers) less), biases 0, norms 1.
CausalLM make_model(const ModelConfig& config);

// A unit for each decoder block; embedding, last norm and head belong to the root unit.
WrapPolicy block_policy();

}  // namespace fsdp::models
