#include "checkpoint/optimizer_access.h"

#include <ATen/ops/zeros.h>
#include <fsdp/checkpoint.h>

#include <algorithm>
#include <set>

#include "checkpoint/json_text.h"
#include "optim/torch_optimizer_state.h"

namespace fsdp {
namespace {

using nlohmann::json;

template <class Options>
class FusedAdamAccess final : public OptimizerAccess {
 public:
  explicit FusedAdamAccess(FusedAdam<Options>& optimizer) : optimizer_(optimizer) {}

  const char* type() const override { return std::is_same_v<Options, AdamWOptions> ? "fsdp::AdamW" : "fsdp::Adam"; }

  std::vector<OptimizerEntry> state(const Parameters&) const override { return entries_of(optimizer_.state()); }

  std::string options() const override {
    json groups = json::array();
    for (size_t g = 0; g < optimizer_.groups(); ++g) {
      const auto& o = optimizer_.options(g);
      groups.push_back({{"lr", o.lr}, {"beta1", o.beta1}, {"beta2", o.beta2}, {"eps", o.eps}, {"weight_decay", o.weight_decay}});
    }
    return json{{"groups", groups}, {"lr_factor", optimizer_.lr_factor()}}.dump();
  }

  void check_options(const std::string& text) const override {
    const auto saved = parse_json(text, "the optimizer's options", 4);
    TORCH_CHECK(saved["groups"].size() == optimizer_.groups(), "the checkpoint's optimizer has ", saved["groups"].size(),
                " parameter groups, this one has ", optimizer_.groups());
  }

  void set_options(const std::string& text) override {
    const auto saved = parse_json(text, "the optimizer's options", 4);
    for (size_t g = 0; g < optimizer_.groups(); ++g) {
      auto& o = optimizer_.options(g);
      const auto& from = saved["groups"][g];
      o.lr = from.at("lr");
      o.beta1 = from.at("beta1");
      o.beta2 = from.at("beta2");
      o.eps = from.at("eps");
      o.weight_decay = from.at("weight_decay");
    }
    optimizer_.set_lr_factor(saved.at("lr_factor"));
  }

  std::vector<OptimizerEntry> restore(const Parameters&, const std::map<std::string, SavedState>& saved) override {
    std::map<std::string, int64_t> steps;
    for (const auto& [name, state] : saved) steps[name] = state.step;
    return entries_of(optimizer_.restore(steps));
  }

 private:
  static std::vector<OptimizerEntry> entries_of(const std::vector<AdamState>& states) {
    std::vector<OptimizerEntry> entries;
    for (const auto& state : states)
      entries.push_back({state.name, state.step, {{"exp_avg", state.exp_avg}, {"exp_avg_sq", state.exp_avg_sq}}});
    return entries;
  }

  FusedAdam<Options>& optimizer_;
};

class TorchAccess final : public OptimizerAccess {
 public:
  explicit TorchAccess(torch::optim::Optimizer& optimizer) : optimizer_(optimizer) {}

  const char* type() const override { return type_of(optimizer_); }

  std::vector<OptimizerEntry> state(const Parameters& parameters) const override {
    std::vector<OptimizerEntry> entries;
    for (const auto* parameter : parameters) {
      const auto found = optimizer_.state().find(parameter->handle.unsafeGetTensorImpl());
      if (found == optimizer_.state().end()) continue;
      const auto [tensors, step] = look_into(*found->second, "parameter '" + parameter->name + "'");
      OptimizerEntry entry{parameter->name, step, {}};
      for (const auto& [name, tensor] : tensors) {
        if (!tensor->defined()) continue;
        TORCH_CHECK(tensor->numel() == parameter->length, name, " of parameter '", parameter->name, "' has ", tensor->numel(),
                    " elements, this rank's slice ", parameter->length, ": call fsdp::shard_optimizer_state after wrapping");
        entry.slices.emplace_back(name, tensor->view({-1}));
      }
      entries.push_back(std::move(entry));
    }
    return entries;
  }

  std::string options() const override {
    json groups = json::array();
    for (const auto& group : optimizer_.param_groups()) groups.push_back({{"lr", group.options().get_lr()}});
    return json{{"groups", groups}}.dump();
  }

  void check_options(const std::string& text) const override {
    const auto saved = parse_json(text, "the optimizer's options", 4);
    TORCH_CHECK(saved["groups"].size() == optimizer_.param_groups().size(), "the checkpoint's optimizer has ", saved["groups"].size(),
                " parameter groups, this one has ", optimizer_.param_groups().size());
  }

  void set_options(const std::string& text) override {
    const auto saved = parse_json(text, "the optimizer's options", 4);
    size_t g = 0;
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(saved["groups"][g++].at("lr"));
  }

  std::vector<OptimizerEntry> restore(const Parameters& parameters, const std::map<std::string, SavedState>& saved) override {
    std::set<const void*> own;
    for (const auto& group : optimizer_.param_groups())
      for (const auto& parameter : group.params()) own.insert(parameter.unsafeGetTensorImpl());
    for (const auto* parameter : parameters) {
      void* const key = parameter->handle.unsafeGetTensorImpl();
      optimizer_.state().erase(key);
      const auto found = saved.find(parameter->name);
      if (found == saved.end()) continue;
      TORCH_CHECK(own.contains(key), "'", parameter->name, "' is none of the optimizer's parameters");
      auto state = new_state(optimizer_, found->second.step);
      for (const auto& [name, tensor] : look_into(*state, "").tensors)
        if (std::find(found->second.slices.begin(), found->second.slices.end(), name) != found->second.slices.end())
          *tensor = at::zeros({parameter->length}, parameter->handle.options()).view(parameter->handle.sizes());
      optimizer_.state()[key] = std::move(state);
    }
    return this->state(parameters);
  }

 private:
  torch::optim::Optimizer& optimizer_;
};

}  // namespace

CheckpointOptimizer::CheckpointOptimizer(torch::optim::Optimizer& optimizer) : access_(std::make_shared<TorchAccess>(optimizer)) {}
CheckpointOptimizer::CheckpointOptimizer(AdamW& optimizer) : access_(std::make_shared<FusedAdamAccess<AdamWOptions>>(optimizer)) {}
CheckpointOptimizer::CheckpointOptimizer(Adam& optimizer) : access_(std::make_shared<FusedAdamAccess<AdamOptions>>(optimizer)) {}

}  // namespace fsdp
