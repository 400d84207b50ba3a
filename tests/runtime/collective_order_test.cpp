// What a step communicates, in exact order, and what it holds.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/rank_part.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

// A parameter of its own and three equal units.
struct ThreeUnitsImpl : nn::Module {
  ThreeUnitsImpl() {
    scale = register_parameter("scale", torch::ones({8}));
    a = register_module("a", nn::Linear(8, 8));
    b = register_module("b", nn::Linear(8, 8));
    c = register_module("c", nn::Linear(8, 8));
  }
  torch::Tensor forward(torch::Tensor x) { return c(torch::tanh(b(torch::tanh(a(x * scale))))); }
  torch::Tensor scale;
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
};
TORCH_MODULE(ThreeUnits);

// Per rank, in floats: a Linear(8, 8) has 72 elements; the scale has 8.
constexpr int64_t kUnitBytes = 72 * 4, kRootBytes = 8 * 4;

}  // namespace

RANKS_TEST("three equal units: gathers root 1, units 2, 1, 1; one reduction each", "[runtime][counts][quick]", 2, 4) {
  auto recorded = record(group);
  ThreeUnits net;
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(72)});
  const auto x = torch::randn({4, 8});
  for (int step = 0; step < 4; ++step) {
    recorded.log->clear();
    auto loss = model(x).square().mean();
    loss.backward();
    model.module()->zero_grad();
    const std::string forward =
        "all_gather the root unit, forward\n"
        "all_gather unit 'a', forward\n"
        "all_gather unit 'b', forward\n"
        "all_gather unit 'c', forward\n"  // a is freed: b and c stay
        "reduce_scatter unit 'c', backward\n";
    const std::string on_demand = "reduce_scatter unit 'b', backward\nall_gather unit 'a', backward\n";
    const std::string in_advance = "all_gather unit 'a', backward\nreduce_scatter unit 'b', backward\n";  // while b computes
    const std::string end = "reduce_scatter unit 'a', backward\nreduce_scatter the root unit, backward\n";
    EXPECT(recorded.log->text() == forward + (step == 0 ? on_demand : in_advance) + end, "step " << step << ":\n" << recorded.log->text());
    const auto stats = model.stats();
    EXPECT(stats.collectives.all_gather.calls == 5 * (step + 1), stats.collectives.all_gather.calls);
    EXPECT(stats.collectives.reduce_scatter.calls == 4 * (step + 1), stats.collectives.reduce_scatter.calls);
  }
}

// Memory: at rest a rank keeps its shards; in a step, root + two units are whole; gradients of at most one unit being filled and
// one in flight, beside the root's, which complete last.
RANKS_TEST("resting bytes are the shards; at most root and two units are whole", "[runtime][memory][quick]", 1, 2, 3) {
  ThreeUnits net;
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(72)});
  // 72 and 8 elements over N ranks, each rank's part rounded up to 4 elements.
  const int64_t n = group.world_size();
  const auto rank_bytes = [&](int64_t elements) { return ((elements + n - 1) / n + 3) / 4 * 4 * 4; };
  const int64_t shards = 3 * rank_bytes(72) + rank_bytes(8);
  EXPECT(model.stats().shard_bytes == shards, model.stats().shard_bytes << " bytes of shards, expected " << shards);
  EXPECT(model.plan().shard_bytes() == shards, model.plan().shard_bytes());
  EXPECT(model.stats().gradient_bytes == 0, "gradients before any backward");
  const auto x = torch::randn({4, 8});
  for (int step = 0; step < 3; ++step) {
    model(x).square().mean().backward();
    const auto stats = model.stats();
    // One rank computes in its shards' own memory.
    const int64_t peak = n == 1 ? 0 : n * (2 * rank_bytes(72) + rank_bytes(8));
    EXPECT(stats.peak_unsharded_bytes == peak, "step " << step << ": peak " << stats.peak_unsharded_bytes << ", expected " << peak);
    EXPECT(stats.resident_unsharded_bytes == 0, stats.resident_unsharded_bytes);
    EXPECT(stats.gradient_bytes == shards, stats.gradient_bytes);
    const int64_t two_units = 2 * n * (rank_bytes(72) + 4 * 4);
    EXPECT(stats.peak_gradient_buffer_bytes <= two_units,
           stats.peak_gradient_buffer_bytes << " bytes of whole gradients, expected at most " << two_units);
  }
}

RANKS_TEST("nothing is communicated at world size 1", "[runtime][counts][quick]", 1) {
  auto recorded = record(group);
  ThreeUnits net;
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(72)});
  model(torch::randn({4, 8})).square().mean().backward();
  model.clip_grad_norm_(0.1);
  EXPECT(recorded.log->text().empty(), recorded.log->text());
}

RANKS_TEST("evaluation gathers each unit once and keeps none", "[runtime][counts][quick]", 2) {
  auto recorded = record(group);
  ThreeUnits net;
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(72)});
  torch::NoGradGuard no_grad;
  for (int i = 0; i < 2; ++i) {
    recorded.log->clear();
    model(torch::randn({4, 8}));
    EXPECT(recorded.log->count("all_gather") == 4, recorded.log->text());
    EXPECT(model.stats().resident_unsharded_bytes == 0, "kept after evaluation");
  }
}

// A rank may reach a parameter that the others do not; the optimizers must still make the same steps.
RANKS_TEST(".grad is defined on all ranks or on none", "[runtime][quick]", 2, 3) {
  struct Net : nn::Module {
    Net() {
      everywhere = register_parameter("everywhere", torch::ones({5}));
      on_last_rank = register_parameter("on_last_rank", torch::ones({5}));
      nowhere = register_parameter("nowhere", torch::ones({5}));
    }
    torch::Tensor forward(bool last) { return last ? (everywhere * on_last_rank).sum() : everywhere.sum(); }
    torch::Tensor everywhere, on_last_rank, nowhere;
  };
  auto net = std::make_shared<Net>();
  fsdp::FullyShardedDataParallel model(net, group);
  const bool last = group.rank() == group.world_size() - 1;
  model(last).backward();
  EXPECT(net->everywhere.grad().defined(), "everywhere");
  EXPECT(net->on_last_rank.grad().defined(), "used on one rank, so it has a gradient on all");
  EXPECT(!net->nowhere.grad().defined(), "used on no rank");
  const double share = 1.0 / group.world_size();
  const auto close = [](const torch::Tensor& grad, double want) {
    const auto part = rank_part(grad);
    return torch::allclose(part, torch::full_like(part, want));
  };
  EXPECT(close(net->everywhere.grad().clone(), 1.0), net->everywhere.grad().clone());
  EXPECT(close(net->on_last_rank.grad().clone(), share), net->on_last_rank.grad().clone());
}
