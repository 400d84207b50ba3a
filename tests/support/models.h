// Small models, written as any LibTorch user writes them: none of them knows of sharding.
#pragma once

#include <torch/torch.h>

namespace fsdp::testing {

struct MlpImpl : torch::nn::Module {
  explicit MlpImpl(int64_t width = 8) {
    fc1 = register_module("fc1", torch::nn::Linear(6, width));
    fc2 = register_module("fc2", torch::nn::Linear(width, width));
    fc3 = register_module("fc3", torch::nn::Linear(width, 3));
  }
  torch::Tensor forward(torch::Tensor x) { return fc3(torch::tanh(fc2(torch::tanh(fc1(x))))); }
  torch::nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
};
TORCH_MODULE(Mlp);

// Images (n, 1, 12, 12) to 10 classes.
struct ConvNetImpl : torch::nn::Module {
  ConvNetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(4, 6, 3).padding(1)));
    fc = register_module("fc", torch::nn::Linear(6 * 5 * 5, 10));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv1(x)), 2);
    return fc(torch::relu(conv2(x)).flatten(1));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(ConvNet);

struct GptBlockImpl : torch::nn::Module {
  GptBlockImpl(int64_t width, int64_t heads) : heads_(heads) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    query = register_module("query", torch::nn::Linear(width, width));
    key = register_module("key", torch::nn::Linear(width, width));
    value = register_module("value", torch::nn::Linear(width, width));
    proj = register_module("proj", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 2 * width));
    down = register_module("down", torch::nn::Linear(2 * width, width));
  }
  torch::Tensor forward(torch::Tensor x) {
    const auto h = norm1(x);
    const auto split = [&](const torch::Tensor& t) { return t.unflatten(-1, {heads_, -1}).transpose(1, 2); };
    auto attended = at::scaled_dot_product_attention(split(query(h)), split(key(h)), split(value(h)), {}, 0.0, /*is_causal=*/true);
    x = x + proj(attended.transpose(1, 2).flatten(2));
    return x + down(torch::gelu(up(norm2(x))));
  }
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear query{nullptr}, key{nullptr}, value{nullptr}, proj{nullptr}, up{nullptr}, down{nullptr};

 private:
  int64_t heads_;
};
TORCH_MODULE(GptBlock);

struct EmbedImpl : torch::nn::Module {
  EmbedImpl(int64_t vocabulary, int64_t length, int64_t width) {
    token = register_module("token", torch::nn::Embedding(vocabulary, width));
    position = register_module("position", torch::nn::Embedding(length, width));
  }
  torch::Tensor forward(torch::Tensor ids) { return token(ids) + position(torch::arange(ids.size(1))); }
  torch::nn::Embedding token{nullptr}, position{nullptr};
};
TORCH_MODULE(Embed);

// Uses the embedding's matrix as its own: one tensor registered in two modules.
struct TiedHeadImpl : torch::nn::Module {
  TiedHeadImpl(int64_t width, torch::Tensor embedding) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    weight = register_parameter("weight", std::move(embedding));
  }
  torch::Tensor forward(torch::Tensor x) { return torch::nn::functional::linear(norm(x), weight); }
  torch::nn::LayerNorm norm{nullptr};
  torch::Tensor weight;
};
TORCH_MODULE(TiedHead);

struct TiedGptImpl : torch::nn::Module {
  static constexpr int64_t kVocabulary = 23, kLength = 7, kWidth = 8;  // 23 rows: no world size here divides them
  explicit TiedGptImpl(int64_t blocks_count = 2) {
    embed = register_module("embed", Embed(kVocabulary, kLength, kWidth));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < blocks_count; ++i) blocks->push_back(GptBlock(kWidth, 2));
    head = register_module("head", TiedHead(kWidth, embed->token->weight));
  }
  torch::Tensor forward(torch::Tensor ids) {
    auto x = embed(ids);
    for (const auto& block : *blocks) x = block->as<GptBlockImpl>()->forward(x);
    return head(x);
  }
  Embed embed{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  TiedHead head{nullptr};
};
TORCH_MODULE(TiedGpt);

}  // namespace fsdp::testing
