// Memory that grew with depth, wrapping that saved nothing, tensors with two names, and collectives without number.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;

namespace {

struct TowerImpl : nn::Module {
  TowerImpl(int64_t depth, int64_t width) {
    layers = register_module("layers", nn::Sequential());
    for (int64_t i = 0; i < depth; ++i) layers->push_back(nn::Linear(width, width));
  }
  Tensor forward(Tensor x) { return layers->forward(x); }
  nn::Sequential layers{nullptr};
};

// What was said while f ran.
template <class Function>
std::string warnings_of(Function f) {
  struct Listener : c10::WarningHandler {
    void process(const c10::Warning& warning) override { heard += warning.msg() + "\n"; }
    std::string heard;
  } listener;
  c10::WarningUtils::WarningHandlerGuard guard(&listener);
  f();
  return listener.heard;
}

// One module under two names.
struct SharedImpl : nn::Module {
  SharedImpl() {
    first = register_module("first", nn::Linear(nn::LinearOptions(3, 3).bias(false)));
    second = register_module("second", first);
  }
  Tensor forward(Tensor x) { return second(first(x)); }
  nn::Linear first{nullptr}, second{nullptr};
};

}  // namespace

// Buffers piled up with each layer, although one unit at a time was at work.
RANKS_TEST("H1: the peak does not grow with the number of units", "[cases][quick]", 1, 2, 3) {
  std::vector<fsdp::Stats> stats;
  for (const int64_t depth : {3, 12}) {
    fsdp::FullyShardedDataParallel model(std::make_shared<TowerImpl>(depth, 8), group,
                                         {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()});
    for (int step = 0; step < 2; ++step) model(torch::ones({2, 8})).square().mean().backward();
    stats.push_back(model.stats());
    EXPECT(stats.back().resident_unsharded_bytes == 0, "memory kept at rest");
    EXPECT(stats.back().gradient_bytes == stats.back().shard_bytes, "gradients as large as the shards, once");
  }
  EXPECT(stats[0].peak_unsharded_bytes == stats[1].peak_unsharded_bytes,
         stats[0].peak_unsharded_bytes << " and " << stats[1].peak_unsharded_bytes);
  EXPECT(stats[0].peak_gradient_buffer_bytes == stats[1].peak_gradient_buffer_bytes,
         stats[0].peak_gradient_buffer_bytes << " and " << stats[1].peak_gradient_buffer_bytes);
}

// Users who wrapped the root alone saw no memory saved, lower speed, and no word about it.
RANKS_TEST("H2: one unit saves little, and is told so", "[cases][quick]", 2, 3) {
  const auto wrap_and_run = [&](const fsdp::WrapPolicy& policy, fsdp::Stats& stats, int64_t& whole) {
    return warnings_of([&] {
      fsdp::FullyShardedDataParallel model(std::make_shared<TowerImpl>(6, 8), group, {.auto_wrap_policy = policy});
      model(torch::ones({2, 8})).square().mean().backward();
      stats = model.stats();
      whole = model.plan().unsharded_bytes();
    });
  };
  fsdp::Stats one, parted;
  int64_t one_whole = 0, parted_whole = 0;
  const auto said = wrap_and_run({}, one, one_whole),
             said_of_parts = wrap_and_run(fsdp::size_based_auto_wrap_policy(1), parted, parted_whole);
  if (group.rank() == 0)
    EXPECT(said.find("one unit of 432 elements") != std::string::npos && said.find("auto_wrap_policy") != std::string::npos, said);
  if (group.rank() > 0) EXPECT(said.empty(), "one rank speaks for all: " << said);
  EXPECT(said_of_parts.empty(), said_of_parts);
  EXPECT(one.peak_unsharded_bytes == one_whole, "the whole model: " << one.peak_unsharded_bytes << " of " << one_whole);
  EXPECT(parted.peak_unsharded_bytes == parted_whole * 2 / 6,
         "two units of six: " << parted.peak_unsharded_bytes << " of " << parted_whole);
}

// A policy that chose one of two tied modules gave a size mismatch deep inside, with no word about tying. Here the tensor has one owner
// around both, and the plan shows both paths.
RANKS_TEST("H5: a parameter shared across units has one owner, under both names", "[cases][quick]", 1, 2, 3) {
  auto gpt = TiedGpt();
  fsdp::FullyShardedDataParallel model(gpt, group, {.auto_wrap_policy = fsdp::module_wrap_policy<EmbedImpl, TiedHeadImpl>()});
  const auto& root = model.plan().units.front();
  bool found = false;
  for (const auto& planned : root.groups)
    for (const auto& parameter : planned.parameters)
      if (parameter.name == "embed.token.weight") {
        found = true;
        EXPECT(parameter.other_names == std::vector<std::string>{"head.weight"}, parameter.other_names.size() << " other names");
      }
  EXPECT(root.name.empty() && found, model.plan().to_string());
  EXPECT(model.named_parameters().contains("embed.token.weight") && !model.named_parameters().contains("head.weight"), "each tensor once");
  model(torch::zeros({1, 7}, torch::kLong)).square().mean().backward();
}

// LibTorch lists a module registered twice twice: its weight took two steps a step and weighed double in the norm.
RANKS_TEST("H10: a shared module steps once and counts once", "[cases][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  auto net = std::make_shared<SharedImpl>(), plain = std::make_shared<SharedImpl>();
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  EXPECT(model.parameters().size() == 1 && model.named_parameters().size() == 1, model.parameters().size() << " entries");
  EXPECT(plain->parameters().size() == 2, "LibTorch itself lists each tensor once now");
  torch::optim::SGD optimizer(model.parameters(), 1.0);
  const auto x = torch::randn({2, 3});
  model(x).square().mean().backward();
  plain->forward(x).square().mean().backward();
  const auto& weight = plain->first->weight;
  const double norm = weight.grad().norm().item<double>(), got = model.clip_grad_norm_(1e9).norm;
  EXPECT(std::abs(got - norm) <= 1e-6 * norm, "norm " << got << " instead of " << norm);
  optimizer.step();
  auto full = model.summon_full_params();
  torch::NoGradGuard no_grad;
  EXPECT(torch::allclose(net->first->weight, weight - weight.grad(), 1e-5, 1e-6), "one step by exactly the gradient");
}

// Thousands of tiny collectives made training several times slower. What a step communicates here follows from the units alone: for k
// units in one stretch, two of which stay from forward, k gathers, k - 2 more in backward, and k reductions.
RANKS_TEST("H13: collectives per step are a function of the units; small siblings share one", "[cases][quick]", 2, 3) {
  const auto per_step = [&](const fsdp::WrapPolicy& policy) {
    auto recorded = record(group);
    fsdp::FullyShardedDataParallel model(std::make_shared<TowerImpl>(8, 4), recorded.group, {.auto_wrap_policy = policy});
    model(torch::ones({2, 4})).square().mean().backward();
    recorded.log->clear();
    model(torch::ones({2, 4})).square().mean().backward();
    return std::pair{recorded.log->count("all_gather"), recorded.log->count("reduce_scatter")};
  };
  // A Linear(4, 4) has 20 elements. Nobody wants the gradient of the input, so backward does not read the first one.
  const auto [gathers, reductions] = per_step(fsdp::size_based_auto_wrap_policy(20));
  EXPECT(gathers == 8 + 5 && reductions == 8, "eight units: " << gathers << " gathers, " << reductions << " reductions");
  const auto [few_gathers, few_reductions] = per_step(fsdp::size_based_auto_wrap_policy(100));
  EXPECT(few_gathers == 1 && few_reductions == 1, "small siblings share their parent's unit: " << few_gathers << ", " << few_reductions);
}
