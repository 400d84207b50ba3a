// What every contestant trains: initial values and tokens by formula, so that the peers (peers/workload.py says the same in Python)
// start from exactly these values and see exactly these tokens. Integers and powers of two only: nothing is rounded differently.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <string>

namespace benchmark {

// Scatters integers: same `seed` and number, same result in [0, 2^32). Products stay below 2^63.
inline torch::Tensor scatter(torch::Tensor numbers, const std::string& seed) {
  constexpr int64_t kMask = 0xffffffff;
  int64_t start = 2166136261;  // FNV-1a over the seed
  for (const unsigned char c : seed) start = ((start ^ c) * 16777619) & kMask;
  auto x = (numbers + start).bitwise_and(kMask);
  for (const int64_t factor : {0x2c1b3c6d, 0x297a2d39}) {
    x = (x * factor).bitwise_and(kMask);
    x = x.bitwise_xor(x.bitwise_right_shift(15));
  }
  return x;
}

// Matrices: uniform within ±1/√(last size). Weights of norms: 1. Biases: 0.
inline void set_initial_values(torch::nn::Module& model) {
  const torch::NoGradGuard no_grad;
  for (auto& entry : model.named_parameters()) {
    auto& value = entry.value();
    if (value.dim() >= 2) {
      const auto bits = scatter(torch::arange(value.numel(), torch::kLong), entry.key()).bitwise_right_shift(8);  // 24 bits: exact in fp32
      const double bound = 1 / std::sqrt(static_cast<double>(value.size(-1)));
      value.copy_(((bits.to(torch::kFloat) / (1 << 24) - 0.5) * (2 * bound)).view(value.sizes()));
    } else {
      value.fill_(entry.key().find("norm") != std::string::npos && entry.key().ends_with(".weight") ? 1 : 0);
    }
  }
}

struct Batch {
  torch::Tensor input, target;  // (batch, sequence)
};

// Rank `rank`'s batch of a step: each row counts up from a number of its own in strides of its own, which a model learns within some
// dozen steps. No row is seen twice.
inline Batch batch_of(int64_t step, int64_t rank, int64_t world_size, int64_t batch, int64_t sequence, int64_t vocabulary) {
  const auto rows = torch::arange(batch, torch::kLong) + (step * world_size + rank) * batch;
  const auto from = scatter(rows, "from").remainder(vocabulary), stride = scatter(rows, "stride").remainder(8) + 1;
  const auto tokens = (from.unsqueeze(1) + stride.unsqueeze(1) * torch::arange(sequence + 1, torch::kLong)).remainder(vocabulary);
  return {tokens.slice(1, 0, sequence), tokens.slice(1, 1)};
}

}  // namespace benchmark
