// One adapter: what lora::attach puts on a weight.
#pragma once

#include <fsdp/lora.h>
#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "runtime/watched_weights.h"

namespace fsdp::lora {

inline constexpr const char* kA = "lora_A";
inline constexpr const char* kB = "lora_B";
inline constexpr const char* kAllLinear = "all-linear";

class LoraAdapter : public ProductObserver {
 public:
  // The parameters A and B are registered in `module` already.
  LoraAdapter(const torch::nn::Module& module, const LoraOptions& options, bool fan_in_first);

  at::Tensor after_product(const at::Tensor& input, const at::Tensor& output) override;

  // s · B A with the weight's orientation, in the adapter's dtype, from whole A and B.
  at::Tensor delta(const at::Tensor& a, const at::Tensor& b) const;

  const at::Tensor& a() const { return a_; }
  const at::Tensor& b() const { return b_; }
  const LoraOptions& options() const { return options_; }
  bool merged = false;

 private:
  at::Tensor a_, b_;
  std::weak_ptr<const torch::nn::Module> module_;
  LoraOptions options_;
  double scaling_;
  bool fan_in_first_;
};

struct AdaptedModule {
  std::string path;
  at::Tensor weight;
  std::shared_ptr<LoraAdapter> adapter;
};

// Every module of the tree that has one, once, in the order of the tree.
std::vector<AdaptedModule> adapted_modules(const torch::nn::Module& root);

}  // namespace fsdp::lora
