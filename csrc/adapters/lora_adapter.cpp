#include "adapters/lora_adapter.h"

#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>

#include <cmath>
#include <set>

#include "plan/registered_parameters.h"

namespace fsdp::lora {

LoraAdapter::LoraAdapter(const torch::nn::Module& module, const LoraOptions& options, bool fan_in_first)
    : a_(RegisteredParameters::of(module)[kA]),
      b_(RegisteredParameters::of(module)[kB]),
      module_(module.weak_from_this()),
      options_(options),
      scaling_(options.alpha / (options.rank_stabilized ? std::sqrt(static_cast<double>(options.r)) : static_cast<double>(options.r))),
      fan_in_first_(fan_in_first) {}

at::Tensor LoraAdapter::after_product(const at::Tensor& input, const at::Tensor& output) {
  if (merged) return output;
  auto x = input.to(a_.scalar_type());
  const auto module = module_.lock();
  if (options_.dropout > 0 && module && module->is_training()) x = at::dropout(x, options_.dropout, true);
  const auto low = at::linear(at::linear(x, a_), b_);
  return output.add(low, scaling_).to(output.scalar_type());
}

at::Tensor LoraAdapter::delta(const at::Tensor& a, const at::Tensor& b) const {
  const auto product = at::matmul(b, a).mul(scaling_);
  return fan_in_first_ ? product.t() : product;
}

std::vector<AdaptedModule> adapted_modules(const torch::nn::Module& root) {
  std::vector<AdaptedModule> found;
  std::set<const ProductObserver*> seen;
  const auto look = [&](const std::string& path, const torch::nn::Module& module) {
    const auto& parameters = RegisteredParameters::of(module);
    const auto* weight = parameters.find("weight");
    if (!weight || !weight->defined()) return;
    auto adapter = std::dynamic_pointer_cast<LoraAdapter>(watched_weights::observer_of(*weight));
    if (adapter && seen.insert(adapter.get()).second) found.push_back({path, *weight, std::move(adapter)});
  };
  look("", root);
  for (const auto& item : root.named_modules("", /*include_self=*/false)) look(item.key(), *item.value());
  return found;
}

}  // namespace fsdp::lora
