// What the byte budget buys: which unit is gathered when, and that nothing but time and memory depends on it.

#include <fsdp/fsdp.h>

#include <chrono>
#include <random>
#include <thread>

#include "support/decorated_collectives.h"
#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;
using fsdp::ShardingStrategy;

namespace {

// A parameter of the root's own, and a chain of equal units of which odd steps may leave one out.
struct ChainImpl : nn::Module {
  explicit ChainImpl(int64_t length, int64_t width = 8) {
    scale = register_parameter("scale", torch::ones({width}));
    links = register_module("links", nn::ModuleList());
    for (int64_t i = 0; i < length; ++i) links->push_back(nn::Linear(width, width));
  }
  torch::Tensor forward(torch::Tensor x, size_t left_out = SIZE_MAX) {
    x = x * scale;
    for (size_t i = 0; i < links->size(); ++i)
      if (i != left_out) x = torch::tanh(links[i]->as<nn::Linear>()->forward(x));
    return x;
  }
  torch::Tensor scale;
  nn::ModuleList links{nullptr};
};
TORCH_MODULE(Chain);

fsdp::WrapPolicy every_linear() { return fsdp::module_wrap_policy<nn::LinearImpl>(); }

int64_t unit_bytes(const fsdp::Plan& plan) { return plan.units[1].unsharded_bytes(plan.world_size); }
int64_t root_bytes(const fsdp::Plan& plan) { return plan.units[0].unsharded_bytes(plan.world_size); }

// Waits a random time, other on each rank, before an operation is started.
class DelayingCollectives : public DecoratedCollectives {
 public:
  DelayingCollectives(std::shared_ptr<fsdp::comm::Collectives> inner, unsigned seed)
      : DecoratedCollectives(inner), random_(seed * 97 + static_cast<unsigned>(inner->rank())) {}

 protected:
  std::unique_ptr<fsdp::comm::Work> start(const fsdp::comm::Request& request) override {
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
    return DecoratedCollectives::start(request);
  }

 private:
  std::mt19937 random_;
};

}  // namespace

// For n equal units used in one stretch with room for k beside the root: a unit is gathered twice, but the last k of forward once.
RANKS_TEST("gathers per step fall with the budget as the formula says", "[runtime][scheduler][quick]", 2, 3) {
  constexpr int64_t kUnits = 5;
  for (int64_t room = 1; room <= kUnits; ++room) {
    auto recorded = record(group);
    Chain net(kUnits);
    const auto plan = fsdp::FullyShardedDataParallel(Chain(kUnits), group, {.auto_wrap_policy = every_linear()}).plan();
    fsdp::FullyShardedDataParallel model(
        net, recorded.group,
        {.auto_wrap_policy = every_linear(), .max_unsharded_bytes = root_bytes(plan) + room * unit_bytes(plan) + unit_bytes(plan) / 2});
    for (int step = 0; step < 4; ++step) {
      recorded.log->clear();
      model(torch::randn({4, 8})).square().mean().backward();
      net->zero_grad();
      const int64_t expected = 1 + room + 2 * (kUnits - room);
      EXPECT(recorded.log->count("all_gather") == expected, "room for " << room << ", step " << step << ": expected " << expected
                                                                        << " gathers:\n"
                                                                        << recorded.log->text());
      EXPECT(recorded.log->count("reduce_scatter") == kUnits + 1, recorded.log->text());
      const auto stats = model.stats();
      EXPECT(stats.peak_unsharded_bytes <= model.plan().max_unsharded_bytes, stats.peak_unsharded_bytes << " bytes at once");
      EXPECT(stats.resident_unsharded_bytes == 0, stats.resident_unsharded_bytes);
    }
  }
}

RANKS_TEST("SHARD_GRAD_OP gathers each unit once a step, ahead of its use", "[runtime][scheduler][quick]", 2) {
  auto recorded = record(group);
  Chain net(4);
  fsdp::FullyShardedDataParallel model(net, recorded.group,
                                       {.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP, .auto_wrap_policy = every_linear()});
  for (int step = 0; step < 3; ++step) {
    recorded.log->clear();
    model(torch::randn({4, 8})).square().mean().backward();
    EXPECT(recorded.log->text() ==
               "all_gather the root unit, forward\nall_gather unit 'links.0', forward\nall_gather unit 'links.1', forward\n"
               "all_gather unit 'links.2', forward\nall_gather unit 'links.3', forward\n"
               "reduce_scatter unit 'links.3', backward\nreduce_scatter unit 'links.2', backward\n"
               "reduce_scatter unit 'links.1', backward\nreduce_scatter unit 'links.0', backward\n"
               "reduce_scatter the root unit, backward\n",
           recorded.log->text());
  }
  // The first unit is asked for when it is needed; the others of steps 1 and 2 are under way before.
  EXPECT(model.stats().prefetches == 2 * 3 && model.stats().prefetch_hits == 2 * 3, model.stats().prefetches);
}

// Where a stream would have to wait for an event: as late as can be, after the next transfers are under way.
RANKS_TEST("transfers are begun early and waited for late", "[runtime][scheduler][quick]", 2) {
  auto recorded = record(group);
  Chain net(3);
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = every_linear()});
  for (int step = 0; step < 2; ++step) {
    recorded.log->clear();
    model(torch::randn({4, 8})).square().mean().backward();
  }
  EXPECT(recorded.log->events() ==
             "start all_gather the root unit, forward\nwait all_gather the root unit, forward\n"
             "start all_gather unit 'links.0', forward\nstart all_gather unit 'links.1', forward\n"
             "wait all_gather unit 'links.0', forward\n"
             // links.0 is freed for links.2, which arrives while links.1 computes.
             "start all_gather unit 'links.2', forward\nwait all_gather unit 'links.1', forward\n"
             "wait all_gather unit 'links.2', forward\n"
             "start reduce_scatter unit 'links.2', backward\n"
             "start all_gather unit 'links.0', backward\n"
             "wait reduce_scatter unit 'links.2', backward\nstart reduce_scatter unit 'links.1', backward\n"
             "wait all_gather unit 'links.0', backward\n"
             "wait reduce_scatter unit 'links.1', backward\nstart reduce_scatter unit 'links.0', backward\n"
             "wait reduce_scatter unit 'links.0', backward\nstart reduce_scatter the root unit, backward\n"
             "wait reduce_scatter the root unit, backward\n",
         recorded.log->events());
}

RANKS_TEST("a tied GPT at three budgets, in exact order", "[runtime][scheduler][quick]", 2) {
  const auto run = [&](int64_t units) {
    auto recorded = record(group);
    TiedGpt net(2);
    const auto policy = fsdp::module_wrap_policy<GptBlockImpl>();
    const auto plan = fsdp::FullyShardedDataParallel(TiedGpt(2), group, {.auto_wrap_policy = policy}).plan();
    fsdp::FullyShardedDataParallel model(net, recorded.group,
                                         {.auto_wrap_policy = policy, .max_unsharded_bytes = root_bytes(plan) + units * unit_bytes(plan)});
    const auto ids = torch::arange(14).reshape({2, 7});
    for (int step = 0; step < 3; ++step) {
      recorded.log->clear();
      model(ids).square().mean().backward();
    }
    return recorded.log->text();
  };
  const std::string begin = "all_gather the root unit, forward\nall_gather unit 'blocks.0', forward\nall_gather unit 'blocks.1', forward\n";
  const std::string end = "reduce_scatter unit 'blocks.0', backward\nreduce_scatter the root unit, backward\n";
  const auto one = run(1), two = run(2), many = run(20);
  EXPECT(one == begin + "reduce_scatter unit 'blocks.1', backward\nall_gather unit 'blocks.0', backward\n" + end, one);
  EXPECT(two == begin + "reduce_scatter unit 'blocks.1', backward\n" + end, two);
  EXPECT(many == two, many);
}

RANKS_TEST("a unit left out in odd steps is not fetched for nothing once both orders are known", "[runtime][scheduler][quick]", 2) {
  auto recorded = record(group);
  Chain net(4);
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = every_linear()});
  std::string even, odd;
  for (int step = 0; step < 8; ++step) {
    recorded.log->clear();
    model(torch::randn({4, 8}), step % 2 ? 1 : SIZE_MAX).square().mean().backward();
    net->zero_grad();
    (step % 2 ? odd : even) = recorded.log->text();
    if (step < 4) continue;
    // Even: 4 units and room for two: 2 + 2·2; odd: 3 units: 2 + 2·1.
    EXPECT(recorded.log->count("all_gather") == (step % 2 ? 5 : 7), "step " << step << ":\n" << recorded.log->text());
    EXPECT(recorded.log->count("reduce_scatter") == (step % 2 ? 4 : 5), recorded.log->text());
  }
  EXPECT(odd.find("links.1") == std::string::npos, odd);
}

RANKS_TEST("buffers are taken in the first two steps and used again ever after", "[runtime][scheduler][memory][quick]", 2, 3) {
  struct Uneven : nn::Module {  // no two units of one size
    Uneven() {
      for (int64_t i = 0; i < 6; ++i) register_module("l" + std::to_string(i), nn::Linear(8 + 5 * i, 13 + 5 * i));
    }
    torch::Tensor forward(torch::Tensor x) {
      for (const auto& child : children()) x = torch::tanh(child->as<nn::Linear>()->forward(x));
      return x;
    }
  };
  for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP}) {
    auto net = std::make_shared<Uneven>();
    fsdp::FullyShardedDataParallel model(net, group, {.sharding_strategy = strategy, .auto_wrap_policy = every_linear()});
    int64_t after_second = 0;
    for (int step = 0; step < 6; ++step) {
      model(torch::randn({3, 8})).square().mean().backward();
      if (step == 1) after_second = model.stats().buffer_allocations;
    }
    EXPECT(model.stats().buffer_allocations == after_second,
           model.stats().buffer_allocations << " allocations, " << after_second << " after the second step");
    EXPECT(model.stats().peak_unsharded_bytes <= model.plan().max_unsharded_bytes, model.stats().peak_unsharded_bytes);
  }
}

namespace {

struct Trained {
  std::vector<torch::Tensor> parameters;
  std::vector<double> losses;
};

Trained train_gpt(const fsdp::ProcessGroup& group, const fsdp::FsdpOptions& options, int steps) {
  torch::manual_seed(5);
  TiedGpt net(3);
  torch::optim::AdamW optimizer(unique_parameters(*net), 1e-2);
  fsdp::FullyShardedDataParallel model(net, group, options);
  Trained trained;
  for (int step = 0; step < steps; ++step) {
    torch::manual_seed(seed_of(step, group.rank()));
    const auto ids = torch::randint(TiedGptImpl::kVocabulary, {2, TiedGptImpl::kLength});
    auto loss = torch::nn::functional::cross_entropy(model(ids).flatten(0, 1), ids.flatten());
    loss.backward();
    model.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    trained.losses.push_back(loss.item<double>());
  }
  const auto whole = model.summon_full_params();
  for (const auto& p : model.parameters()) trained.parameters.push_back(p.detach().clone());
  return trained;
}

void expect_equal(const Trained& got, const Trained& want, const std::string& what) {
  EXPECT(got.losses == want.losses, what << ": losses differ");
  for (size_t i = 0; i < want.parameters.size(); ++i)
    EXPECT(torch::equal(got.parameters[i], want.parameters[i]), what << ": parameter " << i << " differs");
}

}  // namespace

RANKS_TEST("bit-equal training at every budget", "[runtime][scheduler]", 1, 2, 3, 4) {
  const auto policy = fsdp::module_wrap_policy<GptBlockImpl>();
  const auto want = train_gpt(group, {.auto_wrap_policy = policy}, 5);
  expect_equal(train_gpt(group, {.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP, .auto_wrap_policy = policy}, 5), want,
               "SHARD_GRAD_OP");
  const auto plan = fsdp::FullyShardedDataParallel(TiedGpt(3), group, {.auto_wrap_policy = policy}).plan();
  for (int64_t halves = 2; halves <= 6; ++halves) {
    const int64_t budget = root_bytes(plan) + halves * unit_bytes(plan) / 2;
    expect_equal(train_gpt(group, {.auto_wrap_policy = policy, .max_unsharded_bytes = budget}, 5), want, std::to_string(budget) + " bytes");
  }
}

RANKS_TEST("the order does not depend on time", "[runtime][scheduler]", 2, 3) {
  const auto policy = fsdp::module_wrap_policy<GptBlockImpl>();
  std::string first;
  for (unsigned seed = 0; seed < 50; ++seed) {
    auto log = std::make_shared<CollectiveLog>();
    auto delaying = std::make_shared<DelayingCollectives>(group.collectives(), seed);
    const fsdp::ProcessGroup recorded(std::make_shared<RecordingCollectives>(delaying, log));
    train_gpt(recorded, {.auto_wrap_policy = policy}, 3);
    if (seed == 0) first = log->text();
    EXPECT(log->text() == first, "seed " << seed << " of delays changed the order:\n" << log->text());
  }
}

RANKS_TEST("a budget that is too small is refused with the least value that works", "[runtime][scheduler][errors][quick]", 1, 2) {
  const auto wrap = [&](int64_t bytes) {
    Chain net(3);
    fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = every_linear(), .max_unsharded_bytes = bytes});
    model(torch::randn({2, 8})).sum().backward();
    return model.plan();
  };
  const auto plan = wrap(1'000'000);
  const int64_t least = root_bytes(plan) + unit_bytes(plan);
  expect_contains(error_of([&] { wrap(least - 1); }), {"rank ", "max_unsharded_bytes is " + std::to_string(least - 1), "'links.0'",
                                                       "Set it to at least " + std::to_string(least)});
  wrap(least);
}

RANKS_TEST("an operator that needs more than a strict budget names the units and the value", "[runtime][scheduler][errors][quick]", 2) {
  struct Both : nn::Module {
    Both() {
      a = register_module("a", nn::Linear(8, 8));
      b = register_module("b", nn::Linear(8, 8));
    }
    torch::Tensor forward(torch::Tensor x, bool together) {
      return together ? torch::nn::functional::linear(x, torch::cat({a->weight, b->weight})) : b(a(x));
    }
    nn::Linear a{nullptr}, b{nullptr};
  };
  auto net = std::make_shared<Both>();
  const int64_t one = fsdp::FullyShardedDataParallel(std::make_shared<Both>(), group, {.auto_wrap_policy = every_linear()})
                          .plan()
                          .units[0]
                          .unsharded_bytes(group.world_size());
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = every_linear(), .max_unsharded_bytes = one});
  const auto x = torch::randn({2, 8});
  expect_contains(error_of([&] { model(x, true); }),
                  {"one operator needs unit 'a', unit 'b'", "at least " + std::to_string(2 * one), "max_unsharded_bytes"});
  model(x, false).sum().backward();  // it still trains
  EXPECT(net->a->weight.grad().defined(), "no gradient");
}

RANKS_TEST("frozen units stay gathered over steps where they fit", "[runtime][scheduler][quick]", 2) {
  for (const bool fits : {true, false}) {
    auto recorded = record(group);
    Chain net(4);
    for (auto& p : net->links->parameters()) p.set_requires_grad(false);
    const auto plan = fsdp::FullyShardedDataParallel(Chain(4), group, {.auto_wrap_policy = every_linear()}).plan();
    fsdp::FullyShardedDataParallel model(
        net, recorded.group,
        {.auto_wrap_policy = every_linear(), .max_unsharded_bytes = root_bytes(plan) + (fits ? 4 : 1) * unit_bytes(plan)});
    for (int step = 0; step < 3; ++step) {
      recorded.log->clear();
      model(torch::randn({2, 8})).square().sum().backward();
      // Where one fits, each is gathered twice but the last of forward, and the first of backward's end begins the next step.
      const int64_t units = fits ? (step == 0 ? 4 : 0) : (step == 0 ? 7 : 6);
      EXPECT(recorded.log->count("all_gather") == 1 + units, "fits " << fits << ", step " << step << ":\n" << recorded.log->text());
    }
  }
}
