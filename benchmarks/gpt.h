// The model that the benchmarks train: a GPT of given width and depth, written as any LibTorch user writes one.
#pragma once

#include <torch/torch.h>

namespace benchmark {

struct GptOptions {
  int64_t vocabulary = 512, length = 128, width = 256, heads = 4, blocks = 4;  // 3.3M parameters
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const GptOptions& o) : heads(o.heads) {
    const auto norm = torch::nn::LayerNormOptions({o.width});
    norm1 = register_module("norm1", torch::nn::LayerNorm(norm));
    qkv = register_module("qkv", torch::nn::Linear(o.width, 3 * o.width));
    proj = register_module("proj", torch::nn::Linear(o.width, o.width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(norm));
    up = register_module("up", torch::nn::Linear(o.width, 4 * o.width));
    down = register_module("down", torch::nn::Linear(4 * o.width, o.width));
  }
  torch::Tensor forward(torch::Tensor x) {
    auto parts = qkv(norm1(x)).unflatten(-1, {3, heads, -1}).permute({2, 0, 3, 1, 4});  // (3, batch, heads, length, width/heads)
    auto attended = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + proj(attended.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x))));
  }
  int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptOptions& o) {
    token = register_module("token", torch::nn::Embedding(o.vocabulary, o.width));
    position = register_module("position", torch::nn::Embedding(o.length, o.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < o.blocks; ++i) blocks->push_back(Block(o));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({o.width})));
    head = register_module("head", torch::nn::Linear(torch::nn::LinearOptions(o.width, o.vocabulary).bias(false)));
  }
  torch::Tensor forward(torch::Tensor ids) {  // (batch, length) → (batch, length, vocabulary)
    auto x = token(ids) + position(torch::arange(ids.size(1)));
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x);
    return head(norm(x));
  }
  torch::nn::Embedding token{nullptr}, position{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

}  // namespace benchmark
