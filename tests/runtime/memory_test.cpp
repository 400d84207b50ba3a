// What a rank holds, against the formulas of docs/design/memory_model.md.

#include <fsdp/fsdp.h>

#include <malloc.h>

#include <fstream>

#include "support/ranks.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

nn::Sequential stack(int64_t width, int layers) {
  nn::Sequential net;
  for (int i = 0; i < layers; ++i) net->push_back(nn::Linear(width, width));
  return net;
}

fsdp::WrapPolicy every_linear() { return fsdp::module_wrap_policy<nn::LinearImpl>(); }

int64_t resident_pages() {  // of this process, without what the allocator keeps for later
  malloc_trim(0);
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident;
}

}  // namespace

// Shards, gradients and Adam's moments are 16Ψ/N bytes; with padding within 2 %.
RANKS_TEST("state of a model of 50 million parameters on 4 ranks", "[runtime][memory]", 4) {
  auto net = stack(2048, 12);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = every_linear()});
  torch::optim::Adam optimizer(model.parameters(), 1e-4);
  model(torch::ones({2, 2048})).square().mean().backward();
  optimizer.step();
  const auto stats = model.stats();
  int64_t moments = 0;
  for (const auto& [key, state] : optimizer.state()) {
    const auto& adam = static_cast<const torch::optim::AdamParamState&>(*state);
    moments += static_cast<int64_t>(adam.exp_avg().nbytes() + adam.exp_avg_sq().nbytes());
  }
  const int64_t elements = model.plan().numel();
  EXPECT(elements > 50'000'000, elements);
  const double share = static_cast<double>(stats.shard_bytes + stats.gradient_bytes + moments) / (16.0 * elements / 4);
  EXPECT(share > 0.98 && share < 1.02, "state is " << share << " of 16 bytes a parameter over 4 ranks");
  EXPECT(stats.resident_unsharded_bytes == 0, stats.resident_unsharded_bytes);
  // Root (nothing) and two units; a group being filled, one being reduced.
  const int64_t unit = model.plan().units[0].unsharded_bytes(4);
  EXPECT(stats.peak_unsharded_bytes <= 2 * unit, stats.peak_unsharded_bytes << " bytes, a unit has " << unit);
  EXPECT(stats.peak_gradient_buffer_bytes <= 2 * (unit + 4 * 64), stats.peak_gradient_buffer_bytes);
}

RANKS_TEST("the same peak at steps 3 and 100", "[runtime][memory]", 2) {
  auto net = stack(64, 6);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = every_linear()});
  torch::optim::AdamW optimizer(model.parameters(), 1e-4);
  fsdp::Stats third;
  for (int step = 1; step <= 100; ++step) {
    model(torch::ones({2, 64})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step == 3) third = model.stats();
  }
  const auto last = model.stats();
  EXPECT(last.peak_unsharded_bytes == third.peak_unsharded_bytes, last.peak_unsharded_bytes);
  EXPECT(last.peak_gradient_buffer_bytes == third.peak_gradient_buffer_bytes, last.peak_gradient_buffer_bytes);
  EXPECT(last.buffer_allocations == third.buffer_allocations, last.buffer_allocations);
}

RANKS_TEST("resident memory stays within 1 % from step 100 to step 1,000", "[runtime][memory][stress]", 2) {
  auto net = stack(256, 3);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = every_linear()});
  torch::optim::AdamW optimizer(model.parameters(), 1e-4);
  double at_100 = 0;
  for (int step = 1; step <= 1000; ++step) {
    model(torch::randn({8, 256})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step == 100) at_100 = static_cast<double>(resident_pages());
  }
  const double growth = static_cast<double>(resident_pages()) / at_100;
  EXPECT(growth < 1.01, "resident memory grew to " << growth << " of what it was");
}
