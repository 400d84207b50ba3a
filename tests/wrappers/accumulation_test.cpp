// Micro-batches: reduced one by one, or kept and reduced together.

#include <fsdp/fsdp.h>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;
using fsdp::ShardingStrategy;

namespace {

struct SometimesImpl : nn::Module {  // `extra` is used by micro-batch 2 only
  SometimesImpl() {
    mlp = register_module("mlp", Mlp());
    extra = register_module("extra", nn::Linear(6, 6));
  }
  torch::Tensor forward(torch::Tensor x, bool with_extra) { return mlp(with_extra ? extra(x) : x); }
  Mlp mlp{nullptr};
  nn::Linear extra{nullptr};
};

constexpr int kMicroBatches = 4;

torch::Tensor loss_of(SometimesImpl& net, int rank, int step, int micro) {
  torch::manual_seed(seed_of(step * 10 + micro, rank));
  return net.forward(torch::randn({3, 6}), micro == 2).square().mean() / kMicroBatches;
}

// syncs[m]: whether backward of micro-batch m reduces.
void check_accumulation(fsdp::ProcessGroup& group, const std::vector<bool>& syncs, ShardingStrategy strategy) {
  const auto make = [] { return std::make_shared<SometimesImpl>(); };
  torch::manual_seed(7);
  auto net = make();
  Reference<SometimesImpl> reference(group.world_size(), *net, make, [](auto parameters) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2));
  });
  fsdp::FullyShardedDataParallel model(net, group,
                                       {.sharding_strategy = strategy, .auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()});
  torch::optim::AdamW optimizer(model.parameters(), 1e-2);
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < kMicroBatches; ++micro) {
      auto loss = model.call([&](SometimesImpl& m) { return loss_of(m, group.rank(), step, micro); });
      if (syncs[micro]) {
        loss.backward();
      } else {
        const auto kept = model.no_sync();
        loss.backward();
      }
    }
    optimizer.step();
    optimizer.zero_grad();
    reference.step(step, [&](SometimesImpl& m, int rank) {
      torch::Tensor sum;
      for (int micro = 0; micro < kMicroBatches; ++micro) {
        const auto loss = loss_of(m, rank, step, micro);
        sum = sum.defined() ? sum + loss : loss;
      }
      return sum;
    });
  }
  // Not bit-equal at world size 1: the reference adds micro-batches up inside one backward.
  expect_same_parameters(model, reference.copy(0), std::max(2, group.world_size()), {});
}

}  // namespace

RANKS_TEST("micro-batches add up to the whole batch, in any sequence of synced and unsynced", "[wrappers][accumulation][quick]", 1, 2, 4) {
  for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP})
    for (const auto& syncs : std::vector<std::vector<bool>>{
             {true, true, true, true}, {false, false, false, true}, {true, false, false, true}, {false, true, false, true}})
      check_accumulation(group, syncs, strategy);
}

RANKS_TEST("no_sync communicates no gradient, and the next synced backward all of them once", "[wrappers][accumulation][quick]", 2, 3) {
  auto recorded = record(group);
  auto net = std::make_shared<SometimesImpl>();
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()});
  const auto backward = [&](int micro) { model.call([&](SometimesImpl& m) { return loss_of(m, group.rank(), 0, micro); }).backward(); };
  recorded.log->clear();
  {
    const auto kept = model.no_sync();
    {
      const auto inner = model.no_sync();  // guards nest
      backward(2);
    }
    backward(0);
    EXPECT(recorded.log->count("reduce_scatter") == 0, recorded.log->text());
    EXPECT(!net->extra->weight.grad().defined(), "a gradient of what was not reduced");
  }
  backward(1);
  EXPECT(recorded.log->count("reduce_scatter") == 4, recorded.log->text());  // extra's is among them, which micro-batch 1 does not use
  EXPECT(net->extra->weight.grad().defined(), "the kept gradient is lost");
  {
    const auto kept = model.no_sync();
    backward(2);
  }
  model.zero_grad();
  recorded.log->clear();
  backward(1);
  EXPECT(recorded.log->count("reduce_scatter") == 3, recorded.log->text());
  EXPECT(!net->extra->weight.grad().defined(), "zero_grad() left what no_sync had kept");
}

RANKS_TEST("the gradient divisor averages over tokens", "[wrappers][accumulation][quick]", 1, 2, 3) {
  // Rank r has r + 2 tokens; the loss is their sum, divided by all ranks' tokens together.
  int64_t all = 0;
  for (int rank = 0; rank < group.world_size(); ++rank) all += rank + 2;
  const auto tokens = [](int rank) {
    torch::manual_seed(rank);
    return torch::randn({rank + 2, 6});
  };
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  model.set_gradient_divisor(static_cast<double>(all));
  model(tokens(group.rank())).square().sum().backward();
  for (int rank = 0; rank < group.world_size(); ++rank) (plain(tokens(rank)).square().sum() / all).backward();
  auto optimizer = torch::optim::SGD(model.parameters(), 1.0), plain_optimizer = torch::optim::SGD(plain->parameters(), 1.0);
  optimizer.step();
  plain_optimizer.step();
  expect_same_parameters(model, *plain, std::max(2, group.world_size()), {});
  expect_contains(error_of([&] { model.set_gradient_divisor(0); }), {"divisor must be positive", "got 0", "rank "});
}
