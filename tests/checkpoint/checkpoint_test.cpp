// Checkpoints: whatever saved one, whatever loads it, and whatever becomes of its files in between.
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <unistd.h>

#include <catch2/catch_all.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "runtime/flat_views.h"
#include "support/expect_contains.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/shared_folder.h"

using namespace fsdp::testing;
namespace fs = std::filesystem;
namespace nn = torch::nn;
using nlohmann::json;

namespace {

// Ties, dropout, buffers that differ between ranks, a parameter that is never used, one that is frozen, one in another memory order.
struct EverythingImpl : nn::Module {
  EverythingImpl() {
    gpt = register_module("gpt", TiedGpt());
    norm = register_module("norm", nn::BatchNorm1d(5));
    dropout = register_module("dropout", nn::Dropout(0.2));
    fc = register_module("fc", nn::Linear(5, 3));
    columns = register_parameter("columns", torch::randn({4, 3}).t());
    unused = register_parameter("unused", torch::randn({6}));
    frozen = register_parameter("frozen", torch::randn({7}), /*requires_grad=*/false);
  }
  torch::Tensor forward(torch::Tensor ids) {
    const auto x = dropout(gpt(ids)).flatten(0, 1).narrow(1, 0, 5);
    return (fc(norm(x)).mm(columns).square().mean() + frozen.sum());
  }
  TiedGpt gpt{nullptr};
  nn::BatchNorm1d norm{nullptr};
  nn::Dropout dropout{nullptr};
  nn::Linear fc{nullptr};
  torch::Tensor columns, unused, frozen;
};
TORCH_MODULE(Everything);

bool decays(std::string_view name) { return name.ends_with("weight"); }

struct Run {
  explicit Run(const fsdp::ProcessGroup& group, uint64_t seed, fsdp::ShardingStrategy strategy = fsdp::ShardingStrategy::FULL_SHARD,
               bool bf16 = false)
      : group(group),
        net((torch::manual_seed(seed), Everything())),
        model(net, group,
              {.sharding_strategy = strategy,
               .auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl, EmbedImpl>(),
               .mixed_precision = bf16 ? fsdp::MixedPrecision{.param_dtype = torch::kBFloat16} : fsdp::MixedPrecision{},
               .unsharded = [](std::string_view name) { return name == "gpt.blocks.0.norm1.weight"; }}),
        optimizer(model, {.groups = {{decays, {.lr = 0.01, .weight_decay = 0.1}}, {{}, {.lr = 0.02, .weight_decay = 0}}}}) {
    torch::manual_seed(seed + static_cast<uint64_t>(group.rank()));
  }

  // Data of its own per step and rank; dropout draws from the generator.
  double train(int step) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 * step + group.rank());
    const auto ids = torch::randint(TiedGptImpl::kVocabulary, {4, TiedGptImpl::kLength}, generator);
    const auto loss = model(ids);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.item<double>();
  }

  fsdp::ProcessGroup group;
  Everything net;
  fsdp::FullyShardedDataParallel<EverythingImpl> model;
  fsdp::AdamW optimizer;
};

// A checkpoint put together as docs/design/checkpoint_format.md says, by nothing of the library but its reader of safetensors.
std::map<std::string, torch::Tensor> put_together(const std::string& path) {
  const auto manifest = json::parse(std::ifstream(path + "/manifest.json"))["manifest"];
  std::map<std::string, torch::Tensor> wholes;
  for (const auto& [name, tensor] : manifest["tensors"].items()) {
    if (tensor["of_each_rank"]) continue;
    std::vector<torch::Tensor> parts;
    for (const auto& part : tensor["parts"])
      parts.push_back(fsdp::SafetensorsFile(path + "/" + manifest["files"][part["rank"].get<int>()]["name"].get<std::string>()).read(name));
    wholes[name] = torch::cat(parts);
  }
  return wholes;
}

// Each rank's slices are those of the whole.
void expect_slices(Run& run, const std::map<std::string, torch::Tensor>& wholes, const std::string& what) {
  std::map<std::string, std::pair<int64_t, torch::Tensor>> slices;  // begin in the parameter
  fsdp::FlatViews views(fsdp::detail::sharded_model(run.model));
  size_t compared = 0;
  const auto compare = [&](const std::string& name, int64_t begin, const torch::Tensor& slice) {
    EXPECT(wholes.contains(name), what << ": " << name << " is not in the checkpoint");
    EXPECT(torch::equal(wholes.at(name).narrow(0, begin, slice.numel()), slice), what << ": " << name << " differs");
    ++compared;
  };
  std::map<std::string, int64_t> begins;
  for (const auto& flat : views.groups())
    for (const auto& view : flat.parameters) {
      begins[view.name] = view.begin_in_parameter;
      compare("model/" + view.name, view.begin_in_parameter, flat.shard.narrow(0, view.begin, view.length));
    }
  for (const auto& state : run.optimizer.state()) {
    compare("optimizer/" + state.name + "/exp_avg", begins.at(state.name), state.exp_avg);
    compare("optimizer/" + state.name + "/exp_avg_sq", begins.at(state.name), state.exp_avg_sq);
  }
  EXPECT(compared == wholes.size(), what << ": " << compared << " of " << wholes.size() << " compared");
}

// Where pools of several sizes find each other's files: by the process that started them all, and cleared away with its others.
fs::path pairs_folder(pid_t run) { return fs::temp_directory_path() / ("fsdp_tests." + std::to_string(run) + ".pairs"); }

std::string pairs_root(int world_size, bool bf16) {
  return (pairs_folder(getppid()) / (std::to_string(world_size) + (bf16 ? "-bf16" : ""))).string();
}

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

}  // namespace

RANK_BODY("save for all world sizes") {
  for (const bool bf16 : {false, true}) {
    Run run(group, 1, fsdp::ShardingStrategy::FULL_SHARD, bf16);
    for (int step = 0; step < 3; ++step) run.train(step);
    const auto root = pairs_root(group.world_size(), bf16);
    const auto path =
        fsdp::save_checkpoint(root, 3, run.model, run.optimizer, R"({"note": "of )" + std::to_string(group.world_size()) + "\"}");
    EXPECT(path == root + "/step-00000003", path);
    expect_slices(run, put_together(path), "as saved");
  }
}

RANK_BODY("load of all world sizes") {
  for (const int saved : {1, 2, 3, 4})
    for (const bool bf16 : {false, true}) {
      const auto root = pairs_root(saved, bf16);
      Run run(group, 77, saved % 2 ? fsdp::ShardingStrategy::SHARD_GRAD_OP : fsdp::ShardingStrategy::FULL_SHARD, bf16);
      run.train(9);
      run.train(10);
      const auto loaded = fsdp::load_checkpoint(root, run.model, run.optimizer);
      EXPECT(loaded && loaded->step == 3 && loaded->world_size == saved, "another one");
      EXPECT(loaded->extra == R"({"note": "of )" + std::to_string(saved) + "\"}", loaded->extra);
      expect_slices(run, put_together(loaded->path), "saved at " + std::to_string(saved));
      for (const auto& state : run.optimizer.state()) EXPECT(state.step == 3, state.name << " at step " << state.step);
      EXPECT(run.optimizer.options(0).lr == 0.01 && run.optimizer.options(1).weight_decay == 0, "options");
      run.train(3);
    }
}

TEST_CASE("what any world size saves, every other loads bit for bit", "[checkpoint]") {
  for (const int world_size : {1, 2, 3, 4}) run_on_pool(world_size, "save for all world sizes");
  for (const int world_size : {1, 2, 3, 4, 6, 8}) run_on_pool(world_size, "load of all world sizes");
  fs::remove_all(pairs_folder(getpid()));
}

RANKS_TEST("a run that was saved and loaded goes on bit for bit", "[checkpoint][G1][G2][quick]", 1, 2, 3, 4) {
  for (const auto strategy : {fsdp::ShardingStrategy::FULL_SHARD, fsdp::ShardingStrategy::SHARD_GRAD_OP}) {
    const SharedFolder folder(group);
    std::vector<double> straight, resumed;
    Run run(group, 1, strategy);
    for (int step = 0; step < 6; ++step) {
      if (step == 3) fsdp::save_checkpoint(folder.path(), step, run.model, run.optimizer);  // changes nothing, too
      straight.push_back(run.train(step));
    }
    Run fresh(group, 55, strategy);
    fresh.train(17);
    const auto loaded = fsdp::load_checkpoint(folder.path(), fresh.model, fresh.optimizer);
    EXPECT(loaded && loaded->step == 3, "nothing loaded");
    for (int step = 3; step < 6; ++step) resumed.push_back(fresh.train(step));
    EXPECT(std::equal(resumed.begin(), resumed.end(), straight.begin() + 3), "the losses differ: " << resumed << " and " << straight);
    const auto whole = run.model.summon_full_params(), other_whole = fresh.model.summon_full_params();
    const auto other = fresh.net->named_parameters();
    for (const auto& item : run.net->named_parameters()) EXPECT(torch::equal(item.value(), other[item.key()]), item.key() << " differs");
    const auto buffers = fresh.net->named_buffers();
    for (const auto& item : run.net->named_buffers()) EXPECT(torch::equal(item.value(), buffers[item.key()]), item.key() << " differs");
  }
}

RANKS_TEST("before the first step, and without an optimizer", "[checkpoint][G1][quick]", 1, 2) {
  const SharedFolder folder(group);
  Run run(group, 1);
  fsdp::save_checkpoint(folder.path(), 0, run.model, run.optimizer);
  const std::vector<double> straight{run.train(1), run.train(2)};
  Run fresh(group, 2);
  fresh.train(5);
  fsdp::load_checkpoint(folder.path(), fresh.model, fresh.optimizer);
  EXPECT(fresh.optimizer.state().empty(), "state of parameters that were never stepped");
  const std::vector<double> resumed{fresh.train(1), fresh.train(2)};
  EXPECT(straight == resumed, "another run: " << straight << " and " << resumed);
  fsdp::save_checkpoint(folder / "weights", 2, run.model);
  fsdp::load_checkpoint(folder / "weights", fresh.model);
  expect_contains(error_of([&] { fsdp::load_checkpoint(folder / "weights", fresh.model, fresh.optimizer); }), {"holds no optimizer"});
  fsdp::Adam other(fresh.model);
  expect_contains(error_of([&] { fsdp::load_checkpoint(folder.path(), fresh.model, other); }), {"state of fsdp::AdamW", "is fsdp::Adam"});
  fsdp::AdamW one_group(fresh.model);
  expect_contains(error_of([&] { fsdp::load_checkpoint(folder.path(), fresh.model, one_group); }), {"2 parameter groups, this one has 1"});
  EXPECT(!fsdp::load_checkpoint(folder / "none", fresh.model), "a checkpoint out of nothing");
}

RANKS_TEST("LibTorch's optimizers go on bit for bit, those that cannot are refused by name", "[checkpoint][quick]", 1, 3) {
  using Make = std::function<std::unique_ptr<torch::optim::Optimizer>(const std::vector<torch::Tensor>&)>;
  namespace optim = torch::optim;
  const std::vector<Make> makes{
      [](const auto& p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1)); },
      [](const auto& p) { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.1).momentum(0.9)); },
      [](const auto& p) { return std::make_unique<optim::Adam>(p, optim::AdamOptions(0.01).amsgrad(true)); },
      [](const auto& p) { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(0.01)); },
      [](const auto& p) { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(0.01).momentum(0.9).centered(true)); },
      [](const auto& p) { return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(0.01)); }};
  const auto train = [&](auto& model, optim::Optimizer& optimizer, int step) {
    const auto loss = model(torch::full({2, 6}, 0.1f * static_cast<float>(step + group.rank()))).square().sum();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.template item<double>();
  };
  for (const auto& make : makes) {
    const SharedFolder folder(group);
    fsdp::FullyShardedDataParallel model(Mlp(), group), fresh(Mlp(), group);
    const auto optimizer = make(model.parameters()), other = make(fresh.parameters());
    for (int step = 0; step < 3; ++step) train(model, *optimizer, step);
    train(fresh, *other, 7);
    other->param_groups()[0].options().set_lr(7);
    fsdp::save_checkpoint(folder.path(), 3, model, *optimizer);
    fsdp::load_checkpoint(folder.path(), fresh, *other);
    for (int step = 3; step < 6; ++step) {
      const double straight = train(model, *optimizer, step), resumed = train(fresh, *other, step);
      EXPECT(straight == resumed, "step " << step << ": " << straight << " and " << resumed);
    }
  }
  fsdp::FullyShardedDataParallel model(Mlp(), group);
  optim::LBFGS lbfgs(model.parameters());
  const SharedFolder folder(group);
  expect_contains(error_of([&] { fsdp::save_checkpoint(folder.path(), 1, model, lbfgs); }), {"LBFGS keeps one state"});
}

RANKS_TEST("checkpoints are kept as long as was asked for, and replaced by the same step", "[checkpoint][quick]", 1, 2) {
  const SharedFolder folder(group);
  Run run(group, 1);
  fs::create_directories(folder / ".saving-of-a-run-that-died");
  group.barrier();
  for (int step = 1; step <= 7; ++step) {
    run.train(step);
    fsdp::save_checkpoint(folder.path(), step, run.model, run.optimizer, "first", {.keep_last = 2, .keep_every = 4});
  }
  fsdp::save_checkpoint(folder.path(), 7, run.model, run.optimizer, "second", {.keep_last = 2, .keep_every = 4});
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder.path())) names.insert(entry.path().filename());
  EXPECT((names == std::set<std::string>{"step-00000004", "step-00000006", "step-00000007"}), json(names));
  EXPECT(fsdp::load_checkpoint(folder.path(), run.model, run.optimizer)->extra == "second", "the newest");
  EXPECT(fsdp::load_checkpoint(folder / "step-00000004", run.model, run.optimizer)->step == 4, "a given one");
}

RANKS_TEST("what does not fit the model is told in full, and can be left out", "[checkpoint][G13][quick]", 1, 2) {
  const SharedFolder folder(group);
  fsdp::FullyShardedDataParallel saved(Mlp(8), group);
  fsdp::AdamW optimizer(saved);
  saved(torch::ones({2, 6})).sum().backward();
  optimizer.step();
  fsdp::save_checkpoint(folder.path(), 1, saved, optimizer);

  struct OtherImpl : nn::Module {
    OtherImpl() {
      fc1 = register_module("fc1", nn::Linear(6, 8));
      fc2 = register_module("fc2", nn::Linear(8, 9));
      extra = register_module("extra", nn::Linear(2, 2));
    }
    nn::Linear fc1{nullptr}, fc2{nullptr}, extra{nullptr};
  };
  auto net = std::make_shared<OtherImpl>();
  const auto before = net->fc2->weight.detach().clone();
  fsdp::FullyShardedDataParallel other(net, group);
  fsdp::AdamW other_optimizer(other);
  expect_contains(
      error_of([&] { fsdp::load_checkpoint(folder.path(), other, other_optimizer); }),
      {"not in the checkpoint: model/extra.weight, model/extra.bias", "not in the model: optimizer/fc3.bias, optimizer/fc3.weight",
       "model/fc3.weight", "model/fc2.weight is [8, 8] in the checkpoint, [9, 8] in the model"});
  expect_contains(error_of([&] { fsdp::load_checkpoint(folder.path(), other, other_optimizer, {.strict = false}); }),
                  {"model/fc2.weight is [8, 8]"});
  EXPECT(other_optimizer.state().empty(), "something changed");
  fsdp::load_checkpoint(folder.path(), other, other_optimizer, {.strict = false, .skip = fsdp::name_contains("fc2")});
  EXPECT(other_optimizer.state().size() == 2, other_optimizer.state().size() << " parameters with state");
  const auto whole = saved.summon_full_params(), other_whole = other.summon_full_params();
  EXPECT(torch::equal(net->fc1->weight, saved.module()->fc1->weight) && torch::equal(net->fc2->weight, before), "the rest is loaded");
}

RANKS_TEST("what cannot be saved is told on all ranks, and the next save works", "[checkpoint][quick]", 1, 2) {
  const SharedFolder folder(group);
  Run run(group, 1);
  if (group.rank() == 0) write_bytes(folder / "a file", "x");
  group.barrier();
  expect_contains(error_of([&] { fsdp::save_checkpoint(folder / "a file/root", 1, run.model, run.optimizer); }),
                  {group.rank() == 0 ? "a file/root' cannot be made" : "another rank cannot save the checkpoint"});
  expect_contains(error_of([&] { fsdp::save_checkpoint(folder.path(), -1, run.model, run.optimizer); }), {"step must not be negative"});
  expect_contains(error_of([&] { fsdp::save_checkpoint(folder.path(), 1, run.model, run.optimizer, "\xff\xfe"); }), {"UTF-8"});
  if (group.world_size() > 1)
    expect_contains(error_of([&] { fsdp::save_checkpoint(folder.path(), group.rank(), run.model, run.optimizer); }), {"saves step "});
  {
    const auto whole = run.model.summon_full_params({.write_back = true});
    expect_contains(error_of([&] { fsdp::save_checkpoint(folder.path(), 1, run.model, run.optimizer); }), {"summon_full_params"});
    expect_contains(error_of([&] { fsdp::load_checkpoint(folder.path(), run.model, run.optimizer); }), {"summon_full_params"});
  }
  group.barrier();
  size_t left = 0;
  for (const auto& entry : fs::directory_iterator(folder.path())) left += entry.path().filename() != "a file";
  EXPECT(left == 0, left << " things were left behind");
  const auto loss = run.model(torch::zeros({2, 7}, torch::kLong));
  fsdp::save_checkpoint(folder.path(), 1, run.model, run.optimizer);  // between forward and backward
  loss.backward();
}

RANKS_TEST("a damaged checkpoint is refused by the name of what is damaged, or the one before it is taken", "[checkpoint][hostile][quick]",
           1, 2) {
  const SharedFolder folder(group);
  Run run(group, 1);
  run.train(1);
  fsdp::save_checkpoint(folder.path(), 1, run.model, run.optimizer, "old");
  run.train(2);
  const auto path = fsdp::save_checkpoint(folder.path(), 2, run.model, run.optimizer, "new");
  Run fresh(group, 2);
  const auto on_rank_0 = [&](const std::function<void()>& change) {
    group.barrier();
    if (group.rank() == 0) change();
    group.barrier();
  };
  const std::string manifest = bytes_of(path + "/manifest.json"),
                    last = path + "/rank-0000" + std::to_string(group.world_size() - 1) + ".safetensors", content = bytes_of(last);
  const auto expect_refused = [&](const std::string& file, const std::string& bytes, const std::vector<std::string>& expected) {
    const std::string sound = bytes_of(file);
    on_rank_0([&] { write_bytes(file, bytes); });
    expect_contains(error_of([&] { fsdp::load_checkpoint(path, fresh.model, fresh.optimizer); }), expected);
    EXPECT(fsdp::load_checkpoint(folder.path(), fresh.model, fresh.optimizer, {.fall_back = true})->extra == "old", "another one");
    on_rank_0([&] { write_bytes(file, sound); });
  };
  expect_refused(path + "/manifest.json", manifest.substr(0, manifest.size() / 2), {"manifest.json' is no JSON"});
  auto later = json::parse(manifest);
  later["manifest"]["format_version"] = 2;
  expect_refused(path + "/manifest.json", later.dump(), {"manifest.json' is damaged"});
  expect_refused(last, content.substr(0, content.size() - 1), {fs::path(last).filename(), "cut off"});
  expect_refused(last, content + "x", {fs::path(last).filename(), "belongs to none"});
  expect_refused(last, bytes_of(folder / ("step-00000001/" + fs::path(last).filename().string())),
                 {fs::path(last).filename(), "another save's"});
  auto flipped = content;
  flipped[flipped.size() - 9] = static_cast<char>(flipped[flipped.size() - 9] ^ 4);
  expect_refused(last, flipped, {fs::path(last).filename(), "is damaged: the "});
  on_rank_0([&] { fs::rename(last, folder / "away"); });
  expect_contains(error_of([&] { fsdp::load_checkpoint(path, fresh.model, fresh.optimizer); }),
                  {fs::path(last).filename(), "cannot be read"});
  on_rank_0([&] { fs::rename(folder / "away", last); });
  EXPECT(fsdp::load_checkpoint(folder.path(), fresh.model, fresh.optimizer)->extra == "new", "sound again");
}

RANKS_TEST("every flipped bit and every missing end is found", "[checkpoint][hostile]", 1) {
  const SharedFolder folder(group);
  fsdp::FullyShardedDataParallel model(Mlp(8), group);
  fsdp::AdamW optimizer(model);
  model(torch::ones({2, 6})).sum().backward();
  optimizer.step();
  const auto path = fsdp::save_checkpoint(folder.path(), 1, model, optimizer);
  const auto error = [&]() -> std::string {
    try {
      fsdp::load_checkpoint(path, model, optimizer);
    } catch (const c10::Error& refused) {
      return refused.what_without_backtrace();
    }
    return "none";
  };
  std::mt19937 random(7);
  for (const std::string name : {"manifest.json", "rank-00000.safetensors"}) {
    const auto file = path + "/" + name;
    const std::string sound = bytes_of(file);
    size_t header = sound.size();
    if (name != "manifest.json") {
      uint64_t length = 0;
      std::memcpy(&length, sound.data(), sizeof length);
      header = 8 + length;
    }
    std::vector<size_t> bits;
    for (size_t byte = 0; byte < header; ++byte) bits.push_back(8 * byte + random() % 8);
    for (int i = 0; i < 1000 && header < sound.size(); ++i) bits.push_back(8 * header + random() % (8 * (sound.size() - header)));
    for (const size_t bit : bits) {
      auto flipped = sound;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << bit % 8));
      write_bytes(file, flipped);
      EXPECT(error().find(name) != std::string::npos, "bit " << bit << " of " << name << ": " << error());
    }
    for (size_t length = 0; length < sound.size(); length += length < header || sound.size() - length < 100 ? 1 : 37) {
      write_bytes(file, sound.substr(0, length));
      EXPECT(error().find(name) != std::string::npos, length << " bytes of " << name << ": " << error());
    }
    write_bytes(file, sound);
  }
  fsdp::load_checkpoint(path, model, optimizer);
}
