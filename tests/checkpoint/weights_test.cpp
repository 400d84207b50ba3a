// A model's weights in Hugging Face's layout: what one world size, strategy or plain module writes, every other reads.
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
#include "support/temp_folder.h"

using namespace fsdp::testing;
namespace fs = std::filesystem;
namespace nn = torch::nn;
using nlohmann::json;

namespace {

// Ties, buffers of floats and integers, dims in another order than their strides, a parameter that no world size divides.
struct EverythingImpl : nn::Module {
  EverythingImpl() {
    gpt = register_module("gpt", TiedGpt());
    norm = register_module("norm", nn::BatchNorm1d(5));
    fc = register_module("fc", nn::Linear(5, 3));
    columns = register_parameter("columns", torch::randn({4, 3}).t());
    one = register_parameter("one", torch::randn({1}));
    frozen = register_parameter("frozen", torch::randn({7}), /*requires_grad=*/false);
  }
  torch::Tensor forward(torch::Tensor ids) {
    const auto x = gpt(ids).flatten(0, 1).narrow(1, 0, 5);
    return (fc(norm(x)).mm(columns).square().mean() + frozen.sum()) * one;
  }
  TiedGpt gpt{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Linear fc{nullptr};
  torch::Tensor columns, one, frozen;
};
TORCH_MODULE(Everything);

Everything make(uint64_t seed) {
  torch::manual_seed(seed);
  Everything net;
  const torch::NoGradGuard no_grad;
  for (auto& buffer : net->buffers()) buffer.add_(static_cast<int64_t>(seed));
  return net;
}

void expect_equal_to(const nn::Module& net, const nn::Module& expected, const std::string& what) {
  const auto values = expected.named_parameters();
  for (const auto& item : net.named_parameters())
    EXPECT(torch::equal(item.value(), values[item.key()]), what << ": " << item.key() << " differs");
  const auto buffers = expected.named_buffers();
  for (const auto& item : net.named_buffers())
    EXPECT(torch::equal(item.value(), buffers[item.key()]), what << ": " << item.key() << " differs");
}

fsdp::FsdpOptions options_of(fsdp::ShardingStrategy strategy) {
  return {.sharding_strategy = strategy, .auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl, EmbedImpl>()};
}

constexpr auto kStrategies = {fsdp::ShardingStrategy::FULL_SHARD, fsdp::ShardingStrategy::SHARD_GRAD_OP};

}  // namespace

RANKS_TEST("weights written plain are read sharded, and the other way round", "[checkpoint][weights][quick]", 1, 2, 3, 4) {
  const SharedFolder folder(group);
  const auto source = make(1);
  if (group.rank() == 0) fsdp::save_weights(*source, folder / "plain");
  group.barrier();
  for (const auto strategy : kStrategies) {
    auto net = make(2 + group.rank());  // the files decide, not what was there
    fsdp::FullyShardedDataParallel model(net, group, options_of(strategy));
    model(torch::randint(23, {2, 7})).backward();
    fsdp::load_weights(model, folder / "plain");
    {
      const auto whole = model.summon_full_params();
      expect_equal_to(*net, *source, "read sharded");
    }
    fsdp::save_weights(model, folder / "sharded");
    auto back = make(99);
    fsdp::load_weights(*back, folder / "sharded");
    expect_equal_to(*back, *source, "read plain");

    const auto state = fsdp::full_state_dict(model);
    EXPECT(state.empty() == (group.rank() != 0), state.size() << " entries");
    const auto parameters = source->named_parameters();
    for (const auto& [name, tensor] : state)
      if (const auto* expected = parameters.find(name)) EXPECT(torch::equal(tensor, *expected), name << " differs");
    group.barrier();
  }
}

RANKS_TEST("masters are saved, and read into, at their own precision", "[checkpoint][weights][quick]", 1, 3) {
  const SharedFolder folder(group);
  const auto source = make(1);
  auto net = make(1);
  auto options = options_of(fsdp::ShardingStrategy::FULL_SHARD);
  options.mixed_precision.param_dtype = torch::kBFloat16;
  fsdp::FullyShardedDataParallel model(net, group, options);
  fsdp::save_weights(model, folder / "masters");
  auto back = make(2);
  fsdp::load_weights(*back, folder / "masters");
  for (const auto& item : back->named_parameters())
    if (item.value().requires_grad()) EXPECT(torch::equal(item.value(), source->named_parameters()[item.key()]), item.key() << " differs");

  fsdp::save_weights(model, folder / "half", {.dtype = torch::kBFloat16});
  const fsdp::SafetensorsFile file(folder / "half/model.safetensors");
  EXPECT(file.find("norm.num_batches_tracked")->dtype == torch::kLong, "integers stay what they are");
  for (const auto& item : source->named_parameters()) {
    if (item.key() == "gpt.head.weight") continue;  // the embedding's
    EXPECT(file.find(item.key())->dtype == torch::kBFloat16, item.key());
    EXPECT(torch::equal(file.read(item.key()), item.value().to(torch::kBFloat16)), item.key() << " differs");
  }
  fsdp::load_weights(model, folder / "half");
  const auto whole = model.summon_full_params();
  EXPECT(torch::equal(net->fc->weight, source->fc->weight.to(torch::kBFloat16).to(torch::kFloat)),
         "what the file has, in the master's dtype");
}

RANKS_TEST("several files with an index, and one again", "[checkpoint][weights][quick]", 1, 2) {
  const SharedFolder folder(group);
  const auto source = make(1);
  fsdp::FullyShardedDataParallel model(make(1), group, options_of(fsdp::ShardingStrategy::FULL_SHARD));
  fsdp::save_weights(model, folder.path(), {.max_file_bytes = 2000});
  const auto index = json::parse(std::ifstream(folder / "model.safetensors.index.json"));
  int64_t bytes = 0, files = 0;
  for (const auto& entry : fs::directory_iterator(folder.path()))
    if (entry.path().extension() == ".safetensors") {
      const fsdp::SafetensorsFile file(entry.path());
      ++files;
      int64_t of_file = 0;
      for (const auto& weight : file.entries()) {
        of_file += weight.bytes();
        EXPECT(index["weight_map"][weight.name] == entry.path().filename().string(), weight.name << " in " << index["weight_map"]);
      }
      EXPECT(of_file <= 2000, of_file << " bytes in " << entry.path());
      bytes += of_file;
    }
  EXPECT(files > 3 && index["metadata"]["total_size"] == bytes, files << " files, " << bytes << " bytes, " << index["metadata"]);
  auto back = make(2);
  fsdp::load_weights(*back, folder.path());
  expect_equal_to(*back, *source, "several files");
  group.barrier();

  fsdp::save_weights(model, folder.path());
  EXPECT(!fs::exists(folder / "model.safetensors.index.json"), "an index of files that are no longer the model's");
  fsdp::load_weights(*back, folder.path());
  group.barrier();
  fsdp::save_weights(model, folder / "alone.safetensors");
  auto other = make(3);
  fsdp::load_weights(*other, folder / "alone.safetensors");
  expect_equal_to(*other, *source, "a file of its own");
}

RANKS_TEST("what does not fit is told in full, on all ranks, and nothing is changed", "[checkpoint][weights][quick]", 1, 2, 3) {
  const SharedFolder folder(group);
  if (group.rank() == 0) {
    auto tensors = std::vector<std::pair<std::string, torch::Tensor>>{};
    for (const auto& item : make(1)->named_parameters())
      if (item.key() != "gpt.head.weight" && !item.key().starts_with("gpt.blocks.1.norm1")) tensors.emplace_back(item.key(), item.value());
    for (auto& [name, tensor] : tensors) {
      if (name == "fc.weight") tensor = torch::ones({5, 3});
      if (name == "one") tensor = torch::ones({1}, torch::kLong);
    }
    tensors.emplace_back("fc.scale", torch::ones({1}));
    tensors.emplace_back("old.bias", torch::ones({1}));
    fsdp::write_safetensors(folder / "model.safetensors", tensors);
  }
  group.barrier();
  auto net = make(5);
  fsdp::FullyShardedDataParallel model(net, group, options_of(fsdp::ShardingStrategy::FULL_SHARD));
  const auto unchanged = [&](const char* what) {
    const auto whole = model.summon_full_params();
    expect_equal_to(*net, *make(5), what);
  };
  expect_contains(error_of([&] { fsdp::load_weights(model, folder.path()); }),
                  {folder.path(), "not in the files: gpt.blocks.1.norm1.weight, gpt.blocks.1.norm1.bias", "norm.running_mean",
                   "not in the model: fc.scale, old.bias", "fc.weight is [5, 3] in the file, [3, 5] in the model",
                   "one is Long in the file, Float in the model"});
  unchanged("after an error");
  const auto error = error_of([&] { fsdp::load_weights(model, folder.path(), {.strict = false}); });
  expect_contains(error, {"fc.weight is [5, 3]", "one is Long"});
  EXPECT(error.find("not in the") == std::string::npos, error);
  unchanged("shapes and kinds must always fit");
  const auto left_out = [](std::string_view name) {
    return name.starts_with("norm.") || name.find("norm1") != name.npos || name == "fc.weight" || name == "one";
  };
  const fsdp::LoadWeightsOptions fitting{
      .skip = left_out, .ignore = [&](std::string_view name) { return left_out(name) || name == "fc.scale" || name == "old.bias"; }};
  fsdp::load_weights(model, folder.path(), fitting);
  {
    const auto whole = model.summon_full_params();
    EXPECT(torch::equal(net->fc->bias, make(1)->fc->bias) && torch::equal(net->fc->weight, make(5)->fc->weight), "the rest is loaded");
  }
  // One rank alone sees no files.
  if (group.world_size() > 1) {
    const auto place = group.rank() == 1 ? folder / "none" : folder.path();
    expect_contains(error_of([&] { fsdp::load_weights(model, place, fitting); }),
                    {group.rank() == 1 ? "none' cannot be read" : "another rank cannot load its weights"});
  }
  // What cannot be written is told on all ranks too.
  expect_contains(error_of([&] { fsdp::save_weights(model, folder / "model.safetensors/under"); }),
                  {group.rank() == 0 ? "model.safetensors/under' cannot be made" : "another rank cannot save its weights"});
}

RANKS_TEST("names of other libraries are mapped, tied weights come under any of theirs", "[checkpoint][weights][quick]", 2) {
  const SharedFolder folder(group);
  const auto source = make(1);
  if (group.rank() == 0) {
    std::vector<std::pair<std::string, torch::Tensor>> tensors;
    for (const auto& item : source->named_parameters())
      if (item.key() != "gpt.embed.token.weight") tensors.emplace_back("model." + item.key(), item.value());
    for (const auto& item : source->named_buffers()) tensors.emplace_back("model." + item.key(), item.value());
    fsdp::write_safetensors(folder / "model.safetensors", tensors);
  }
  group.barrier();
  auto net = make(2);
  fsdp::FullyShardedDataParallel model(net, group, options_of(fsdp::ShardingStrategy::FULL_SHARD));
  const auto rename = [](std::string_view name) { return "model." + std::string(name); };
  fsdp::load_weights(model, folder.path(), {.rename = rename});
  {
    const auto whole = model.summon_full_params();
    expect_equal_to(*net, *source, "renamed");
  }
  fsdp::save_weights(model, folder / "out", {.rename = rename, .skip = fsdp::name_contains("gpt.")});
  const fsdp::SafetensorsFile file(folder / "out/model.safetensors");
  EXPECT(file.find("model.fc.weight") && !file.find("fc.weight") && !file.find("model.gpt.embed.token.weight"), "renamed and skipped");
}

RANKS_TEST("saving gathers one unit after the other, and only what is saved; loading gathers nothing", "[checkpoint][weights][quick]", 2) {
  auto recorded = record(group);
  const SharedFolder folder(group);
  fsdp::FullyShardedDataParallel model(Mlp(), recorded.group, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()});
  recorded.log->clear();
  fsdp::save_weights(model, folder.path());
  const auto gathers = [&] {
    std::string lines;
    std::istringstream in(recorded.log->text());
    for (std::string line; std::getline(in, line);)
      if (line.starts_with("all_gather")) lines += line + "\n";
    return lines;
  };
  EXPECT(gathers() == "all_gather unit 'fc1', saving\nall_gather unit 'fc2', saving\nall_gather unit 'fc3', saving\n",
         recorded.log->text());
  recorded.log->clear();
  fsdp::save_weights(model, folder / "part", {.skip = [](std::string_view name) { return !name.starts_with("fc2"); }});
  EXPECT(gathers() == "all_gather unit 'fc2', saving\n", recorded.log->text());
  recorded.log->clear();
  fsdp::load_weights(model, folder.path());
  EXPECT(gathers().empty(), recorded.log->text());
}

RANKS_TEST("weights are saved and loaded between steps only", "[checkpoint][weights][quick]", 1, 2) {
  const SharedFolder folder(group);
  auto net = make(1);
  fsdp::FullyShardedDataParallel model(net, group, options_of(fsdp::ShardingStrategy::FULL_SHARD));
  const auto ids = torch::zeros({2, 7}, torch::kLong);
  auto loss = model(ids);
  fsdp::save_weights(model, folder / "between");  // forward and backward
  loss.backward();
  loss = model(ids);
  fsdp::load_weights(model, folder / "between");
  expect_contains(error_of([&] { loss.backward(); }), {"modified by an inplace operation"});
  {
    const auto whole = model.summon_full_params({.write_back = true});
    expect_contains(error_of([&] { fsdp::save_weights(model, folder / "within"); }), {"summon_full_params"});
    expect_contains(error_of([&] { fsdp::load_weights(model, folder / "between"); }), {"summon_full_params"});
  }
  expect_contains(error_of([&] { fsdp::load_weights(*net, folder / "between"); }),
                  {"is sharded; load and save weights through the wrapper"});
  expect_contains(error_of([&] { fsdp::save_weights(*net, folder / "raw"); }), {"is sharded; load and save weights through the wrapper"});
  nn::Module& as_module = model;
  fsdp::save_weights(as_module, folder / "as_module");  // the wrapper, seen as a module
  auto back = make(2);
  fsdp::load_weights(*back, folder / "as_module");
  model.unwrap();
  expect_equal_to(*back, *net, "through the base class");
}

TEST_CASE("an index that does not fit its files, or leads out of its folder, is refused", "[checkpoint][weights][hostile][quick]") {
  const TempFolder folder;
  fs::create_directories(folder / "model");
  const auto index = folder / "model/model.safetensors.index.json";
  fsdp::write_safetensors(folder / "secret.safetensors", {{"weight", torch::ones({3, 2})}, {"bias", torch::ones({3})}});
  fsdp::write_safetensors(folder / "model/a.safetensors", {{"weight", torch::ones({3, 2})}});
  fsdp::write_safetensors(folder / "model/b.safetensors", {{"bias", torch::ones({3})}});
  fsdp::write_safetensors(folder / "model/both.safetensors", {{"bias", torch::ones({3})}, {"weight", torch::ones({3, 2})}});
  fs::create_directory(folder / "model/folder.safetensors");
  const auto error_with = [&](const std::string& text) -> std::string {
    std::ofstream(index) << text;
    nn::Linear net(2, 3);
    const auto started = std::chrono::steady_clock::now();
    try {
      fsdp::load_weights(*net, folder / "model");
    } catch (const c10::Error& error) {
      CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(1));
      return error.what_without_backtrace();
    }
    return "no error";
  };
  const auto map = [](const json& weight, const json& bias) { return json{{"weight_map", {{"weight", weight}, {"bias", bias}}}}.dump(); };
  CHECK(error_with(map("a.safetensors", "b.safetensors")) == "no error");

  using Catch::Matchers::ContainsSubstring;
  const std::vector<json> names{"",
                                ".",
                                "..",
                                "../secret.safetensors",
                                "./a.safetensors",
                                "/etc/passwd",
                                (folder / "secret.safetensors").string(),
                                "../model/a.safetensors",
                                "a.safetensors/",
                                "a.safetensors/../a.safetensors",
                                "sub/a.safetensors",
                                "..\\secret.safetensors",
                                "C:\\a.safetensors",
                                "file:///a.safetensors",
                                "~/a.safetensors",
                                ".a.safetensors",
                                "..safetensors",
                                "a.bin",
                                "a.safetensors.exe",
                                "a.SAFETENSORS",
                                std::string("a\0.safetensors", 14),
                                std::string("a.safetensors\0", 14),
                                std::string(300, 'a') + ".safetensors",
                                1,
                                nullptr,
                                json::array({"a.safetensors"}),
                                json::object({{"a.safetensors", 1}}),
                                true};
  CHECK(names.size() >= 25);
  for (const auto& name : names) {
    INFO(name.dump());
    CHECK_THAT(error_with(map("a.safetensors", name)), ContainsSubstring("'bias' must be in a .safetensors file of the same folder"));
  }
  CHECK_THAT(error_with(map("a.safetensors", "missing.safetensors")), ContainsSubstring("missing.safetensors' cannot be read"));
  CHECK_THAT(error_with(map("a.safetensors", "folder.safetensors")), ContainsSubstring("no regular file"));
  CHECK_THAT(error_with(map("a.safetensors", "a.safetensors")), ContainsSubstring("weight 'bias' is not in 'a.safetensors'"));
  CHECK_THAT(error_with(map("b.safetensors", "a.safetensors")), ContainsSubstring("is not in"));
  CHECK_THAT(error_with(map("a.safetensors", "both.safetensors")), ContainsSubstring("is in '") && ContainsSubstring("and in '"));
  for (const std::string text :
       {"", "[]", "{}", "{\"weight_map\":[]}", "{\"weight_map\":{\"a\":1}}", "{\"weight_map\":{},\"weight_map\":{}}"})
    CHECK_THAT(error_with(text), ContainsSubstring("index.json"));
  fs::remove(index);
  nn::Linear net(2, 3);
  CHECK_THROWS_WITH(fsdp::load_weights(*net, folder / "model"), ContainsSubstring("neither model.safetensors nor"));
}
