// Adapters in PEFT's layout, from and into any strategy. (That PEFT reads them, and this library PEFT's: tests/golden and tests/interop.)
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <catch2/catch_all.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"
#include "support/shared_folder.h"

using namespace fsdp::testing;
namespace lora = fsdp::lora;
namespace fs = std::filesystem;
namespace nn = torch::nn;
using nlohmann::json;

namespace {

const lora::LoraOptions kOptions{.r = 3, .alpha = 6, .target_modules = {"query", "up"}};

// With every element of the adapters set to `value`.
TiedGpt adapted(double value, const lora::LoraOptions& options = kOptions) {
  TiedGpt net(2);
  const torch::NoGradGuard no_grad;
  for (const auto& each : lora::attach(*net, options)) torch::Tensor(each).fill_(value);
  return net;
}

std::vector<torch::Tensor> adapters_of(const nn::Module& net) {
  std::vector<torch::Tensor> adapters;
  for (const auto& item : net.named_parameters())
    if (item.key().find("lora_") != std::string::npos) adapters.push_back(item.value().detach().clone());
  return adapters;
}

void expect_equal(const std::vector<torch::Tensor>& got, const std::vector<torch::Tensor>& expected, const std::string& what) {
  EXPECT(got.size() == expected.size() && !got.empty(), what << ": " << got.size() << " adapters, expected " << expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT(torch::equal(got[i], expected[i]), what << ": adapter " << i << " differs");
}

}  // namespace

RANKS_TEST("F7: an adapter's file is complete, and small, whatever the strategy", "[checkpoint][adapters][F7][quick]", 1, 2, 3, 4) {
  for (const auto strategy : {fsdp::ShardingStrategy::FULL_SHARD, fsdp::ShardingStrategy::SHARD_GRAD_OP})
    for (const bool whole_on_every_rank : {false, true}) {
      const SharedFolder folder(group);
      fsdp::FsdpOptions options{
          .sharding_strategy = strategy, .auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>(), .sync_module_states = false};
      if (whole_on_every_rank) options.unsharded = fsdp::name_contains("lora_");
      // Each rank's slice has the rank's own number, so that one rank's part in place of all would be seen.
      auto net = adapted(whole_on_every_rank ? 7 : 1 + group.rank());
      auto recorded = record(group);
      fsdp::FullyShardedDataParallel model(net, recorded.group, options);
      std::vector<torch::Tensor> expected;
      int64_t bytes = 0;
      {
        const auto whole = model.summon_full_params();
        expected = adapters_of(*net);
        for (const auto& each : expected) bytes += static_cast<int64_t>(each.nbytes());
      }
      recorded.log->clear();
      lora::save_adapter(model, folder / "adapter");
      EXPECT(recorded.log->count("all_gather") == (whole_on_every_rank || group.world_size() == 1 ? 0 : 2), recorded.log->text());
      const auto file_bytes = static_cast<int64_t>(fs::file_size(folder / "adapter/adapter_model.safetensors"));
      EXPECT(file_bytes >= bytes && file_bytes < 2 * bytes, file_bytes << " bytes of file, " << bytes << " of adapters");

      auto fresh = adapted(0);
      fsdp::FullyShardedDataParallel other(fresh, group, options);
      lora::load_adapter(other, folder / "adapter");
      {
        const auto whole = other.summon_full_params();
        expect_equal(adapters_of(*fresh), expected, "loaded sharded");
      }
      auto plain = adapted(0, lora::read_options(folder / "adapter"));
      lora::load_adapter(*plain, folder / "adapter");
      expect_equal(adapters_of(*plain), expected, "loaded plain");
      if (group.rank() == 0) lora::save_adapter(*plain, folder / "plain");
      group.barrier();
      lora::load_adapter(other, folder / "plain");
    }
}

RANKS_TEST("a merged model is saved as plain weights, and its adapters once they are unmerged", "[checkpoint][adapters][quick]", 1, 2) {
  const SharedFolder folder(group);
  torch::manual_seed(1);
  auto net = adapted(0.5);
  fsdp::FullyShardedDataParallel model(net, group, {.unsharded = fsdp::name_contains("lora_")});
  const auto ids = torch::randint(23, {2, 7});
  const auto wanted = model(ids);
  lora::merge(model);
  fsdp::save_weights(model, folder / "merged", {.skip = fsdp::name_contains("lora_")});
  TiedGpt plain(2);
  fsdp::load_weights(*plain, folder / "merged");
  EXPECT(torch::allclose(plain(ids), wanted, 1e-5, 1e-6), "merged weights compute something else");
  lora::save_adapter(model, folder / "adapter");
  expect_contains(error_of([&] { lora::load_adapter(model, folder / "adapter"); }), {"is merged; unmerge first"});
  lora::unmerge(model);
  lora::load_adapter(model, folder / "adapter");
}

RANKS_TEST("adapters that are not there, or other ones, are named on all ranks", "[checkpoint][adapters][quick]", 1, 2) {
  const SharedFolder folder(group);
  fsdp::FullyShardedDataParallel without(TiedGpt(2), group);
  expect_contains(error_of([&] { lora::save_adapter(without, folder / "a"); }), {"the model has no adapters"});
  fsdp::FullyShardedDataParallel model(adapted(1), group);
  lora::save_adapter(model, folder / "a");
  expect_contains(error_of([&] { lora::load_adapter(without, folder / "a"); }), {"the model has no adapters; lora::attach"});
  expect_contains(error_of([&] { lora::load_adapter(model, folder / "none"); }), {"none/adapter_config.json' cannot be read"});

  fsdp::FullyShardedDataParallel other(adapted(2, {.r = 2, .alpha = 8, .target_modules = {"query", "up"}}), group);
  expect_contains(error_of([&] { lora::load_adapter(other, folder / "a"); }),
                  {"'blocks.0.query' has r 2, alpha 8", "has r 3, alpha 6", "read_options"});
  fsdp::FullyShardedDataParallel more(adapted(2, {.r = 3, .alpha = 6, .target_modules = {"query", "key"}}), group);
  expect_contains(
      error_of([&] { lora::load_adapter(more, folder / "a"); }),
      {"not in the files: blocks.0.key.lora_A, blocks.0.key.lora_B", "not in the model: base_model.model.blocks.0.up.lora_A.weight"});
  auto mixed = adapted(1);
  lora::attach(*mixed, {.r = 1, .target_modules = {"value"}});
  expect_contains(error_of([&] { lora::save_adapter(*mixed, folder / "mixed"); }),
                  {"'blocks.0.query' and 'blocks.0.value'", "different options"});
}

TEST_CASE("PEFT's settings are understood or refused", "[checkpoint][adapters][quick]") {
  const TempFolder folder;
  const json sound{{"peft_type", "LORA"},
                   {"r", 4},
                   {"lora_alpha", 32},
                   {"lora_dropout", 0.1},
                   {"use_rslora", true},
                   {"fan_in_fan_out", true},
                   {"target_modules", {"c_attn"}},
                   {"bias", "none"},
                   {"use_dora", false},
                   {"rank_pattern", json::object()},
                   {"modules_to_save", nullptr},
                   {"peft_version", "0.21.2"}};
  const auto with = [&](json config) {
    std::ofstream(folder / "adapter_config.json") << config.dump();
    return lora::read_options(folder.path());
  };
  const auto options = with(sound);
  CHECK((options.r == 4 && options.alpha == 32 && options.dropout == 0.1 && options.rank_stabilized && options.fan_in_fan_out));
  CHECK(options.target_modules == std::vector<std::string>{"c_attn"});
  using Catch::Matchers::ContainsSubstring;
  const std::vector<std::pair<const char*, json>> refused{{"peft_type", "IA3"},
                                                          {"peft_type", nullptr},
                                                          {"bias", "all"},
                                                          {"use_dora", true},
                                                          {"rank_pattern", {{"a", 2}}},
                                                          {"r", "4"},
                                                          {"r", 4.5},
                                                          {"lora_alpha", "x"},
                                                          {"use_rslora", 1},
                                                          {"modules_to_save", {"lm_head"}},
                                                          {"target_modules", ".*"},
                                                          {"target_modules", json::array()},
                                                          {"target_modules", {1}},
                                                          {"layers_to_transform", {0}},
                                                          {"init_lora_weights", "pissa"},
                                                          {"something_new", 1}};
  for (const auto& [key, value] : refused) {
    INFO(key << " " << value.dump());
    auto config = sound;
    config[key] = value;
    CHECK_THROWS_WITH(with(config), ContainsSubstring(key) && ContainsSubstring("adapter_config.json"));
  }
}
