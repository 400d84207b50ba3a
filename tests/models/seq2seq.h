// A recurrent encoder and decoder: an LSTM called twice, a GRU cell in a loop, several inputs with defaults, nested results.
#pragma once

#include <torch/torch.h>

#include <optional>
#include <tuple>
#include <vector>

namespace models {

struct Seq2SeqOptions {
  TORCH_ARG(int64_t, vocabulary) = 11;
  TORCH_ARG(int64_t, width) = 8;
  TORCH_ARG(int64_t, layers) = 2;
  TORCH_ARG(double, dropout) = 0.0;
};

class Seq2SeqImpl : public torch::nn::Module {
 public:
  explicit Seq2SeqImpl(const Seq2SeqOptions& options = {}) : options_(options) {
    const auto width = options.width();
    embedding = register_module("embedding", torch::nn::Embedding(options.vocabulary(), width));
    encoder = register_module("encoder", torch::nn::LSTM(torch::nn::LSTMOptions(width, width)
                                                             .num_layers(options.layers())
                                                             .dropout(options.dropout())
                                                             .batch_first(true)
                                                             .bidirectional(true)));
    bridge = register_module("bridge", torch::nn::Linear(2 * width, width));
    decoder = register_module("decoder", torch::nn::GRUCell(width, width));
    output = register_module("output", torch::nn::Linear(width, options.vocabulary()));
  }

  // Logits by step, and the states that the decoder went through.
  std::tuple<torch::Tensor, std::vector<torch::Tensor>> forward(torch::Tensor source, torch::Tensor target = {}, int64_t steps = 4,
                                                                std::optional<torch::Tensor> mask = std::nullopt) {
    auto embedded = embedding->forward(source);
    if (mask) embedded = embedded * mask->unsqueeze(-1);
    auto [encoded, state] = encoder->forward(embedded);
    std::tie(encoded, state) = encoder->forward(embedded.flip(1), state);  // reads the text twice
    auto hidden = torch::tanh(bridge->forward(encoded.mean(1)));
    auto token = source.select(1, 0);
    std::vector<torch::Tensor> logits, states;
    for (int64_t t = 0; t < (target.defined() ? target.size(1) : steps); ++t) {
      hidden = decoder->forward(embedding->forward(token), hidden);
      logits.push_back(output->forward(hidden));
      states.push_back(hidden);
      token = target.defined() ? target.select(1, t) : logits.back().argmax(-1);
    }
    return {torch::stack(logits, 1), states};
  }

  torch::nn::Embedding embedding{nullptr};
  torch::nn::LSTM encoder{nullptr};
  torch::nn::Linear bridge{nullptr}, output{nullptr};
  torch::nn::GRUCell decoder{nullptr};

 private:
  Seq2SeqOptions options_;
};
TORCH_MODULE(Seq2Seq);

}  // namespace models
