// A variational autoencoder: members on the stack, methods other than forward, a struct as the result.
#pragma once

#include <torch/torch.h>

namespace models {

struct VaeOutput {
  torch::Tensor reconstruction;
  torch::Tensor mu;
  torch::Tensor log_variance;
};

class Vae : public torch::nn::Module {
 public:
  Vae(int64_t features, int64_t hidden, int64_t latent)
      : fc1(features, hidden), fc_mu(hidden, latent), fc_log_variance(hidden, latent), fc2(latent, hidden), fc3(hidden, features) {
    register_module("fc1", fc1);
    register_module("fc_mu", fc_mu);
    register_module("fc_log_variance", fc_log_variance);
    register_module("fc2", fc2);
    register_module("fc3", fc3);
    latent_ = latent;
  }

  std::pair<torch::Tensor, torch::Tensor> encode(torch::Tensor x) {
    auto h = torch::relu(fc1->forward(x));
    return {fc_mu->forward(h), fc_log_variance->forward(h)};
  }

  torch::Tensor reparameterize(torch::Tensor mu, torch::Tensor log_variance) {
    if (!is_training()) return mu;
    auto deviation = log_variance.div(2).exp();
    return torch::randn_like(deviation) * deviation + mu;
  }

  torch::Tensor decode(torch::Tensor z) { return torch::sigmoid(fc3->forward(torch::relu(fc2->forward(z)))); }

  torch::Tensor sample(int64_t count) {
    torch::NoGradGuard no_grad;
    return decode(torch::randn({count, latent_}));
  }

  VaeOutput forward(torch::Tensor x) {
    auto [mu, log_variance] = encode(x);
    return {decode(reparameterize(mu, log_variance)), mu, log_variance};
  }

 private:
  torch::nn::Linear fc1, fc_mu, fc_log_variance, fc2, fc3;
  int64_t latent_;
};

inline torch::Tensor vae_loss(const VaeOutput& output, const torch::Tensor& x) {
  auto reconstruction = torch::nn::functional::binary_cross_entropy(
      output.reconstruction, x, torch::nn::functional::BinaryCrossEntropyFuncOptions().reduction(torch::kSum));
  auto divergence = -0.5 * torch::sum(1 + output.log_variance - output.mu.pow(2) - output.log_variance.exp());
  return reconstruction + divergence;
}

}  // namespace models
