#include "checkpoint/optimizer_access.h"

#include <fsdp/checkpoint.h>

#include "checkpoint/json_text.h"

namespace fsdp {
namespace {

using nlohmann::json;

template <class Options>
class FusedAdamAccess final : public OptimizerAccess {
 public:
  explicit FusedAdamAccess(FusedAdam<Options>& optimizer) : optimizer_(optimizer) {}

  const char* type() const override { return std::is_same_v<Options, AdamWOptions> ? "fsdp::AdamW" : "fsdp::Adam"; }

  std::vector<OptimizerEntry> state() const override { return entries_of(optimizer_.state()); }

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

  std::vector<OptimizerEntry> restore(const std::map<std::string, int64_t>& steps) override {
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

}  // namespace

CheckpointOptimizer::CheckpointOptimizer(AdamW& optimizer) : access_(std::make_shared<FusedAdamAccess<AdamWOptions>>(optimizer)) {}
CheckpointOptimizer::CheckpointOptimizer(Adam& optimizer) : access_(std::make_shared<FusedAdamAccess<AdamOptions>>(optimizer)) {}

}  // namespace fsdp
