// EmbeddingBag, ParameterDict and ParameterList, and a loss that walks named_parameters().
#pragma once

#include <torch/torch.h>

namespace models {

struct TextClassifierImpl : torch::nn::Module {
  TextClassifierImpl(int64_t vocabulary, int64_t width, int64_t classes)
      : embedding(torch::nn::EmbeddingBagOptions(vocabulary, width).mode(torch::kMean)) {
    register_module("embedding", embedding);
    gates = register_module("gates", torch::nn::ParameterDict());
    gates->insert("scale", torch::ones({width}).requires_grad_());
    gates->insert("shift", torch::zeros({width}).requires_grad_());
    layers = register_module("layers", torch::nn::ParameterList());
    for (int i = 0; i < 3; ++i) layers->append((torch::randn({width, width}) / width).requires_grad_());
    classifier = register_parameter("classifier", torch::randn({classes, width}) / width);
  }

  torch::Tensor forward(torch::Tensor words, torch::Tensor offsets = {}) {
    auto x = embedding->forward(words, offsets) * gates["scale"] + gates["shift"];
    for (const auto& layer : *layers) x = x + torch::tanh(torch::mm(x, layer.value()));
    return torch::matmul(x, classifier.t());
  }

  torch::nn::EmbeddingBag embedding;
  torch::nn::ParameterDict gates{nullptr};
  torch::nn::ParameterList layers{nullptr};
  torch::Tensor classifier;
};
TORCH_MODULE(TextClassifier);

// Cross-entropy, and an L2 penalty on all matrices.
inline torch::Tensor penalised_loss(torch::nn::Module& module, const torch::Tensor& logits, const torch::Tensor& target) {
  auto loss = torch::nn::functional::cross_entropy(logits, target);
  for (const auto& parameter : module.named_parameters())
    if (parameter.value().dim() > 1 && parameter.key().find("embedding") == std::string::npos)
      loss = loss + 1e-2 * parameter.value().pow(2).sum();
  return loss;
}

}  // namespace models
