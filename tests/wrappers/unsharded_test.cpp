// Parameters that stay whole on every rank beside sharded ones.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

// A frozen base with small trainable matrices beside it, as adapters are.
struct AdaptedImpl : nn::Module {
  explicit AdaptedImpl(bool freeze_base = true) {
    for (int i = 0; i < 3; ++i) {
      const auto id = std::to_string(i);
      base.push_back(register_module("base" + id, nn::Linear(8, 8)));
      if (freeze_base)
        for (auto& p : base.back()->parameters()) p.set_requires_grad(false);
      a.push_back(register_parameter("lora_a" + id, torch::randn({2, 8})));
      b.push_back(register_parameter("lora_b" + id, torch::randn({8, 2}) * 0.1));
    }
  }
  torch::Tensor forward(torch::Tensor x) {
    for (size_t i = 0; i < base.size(); ++i) {
      const auto low = nn::functional::linear(nn::functional::linear(x.to(a[i].scalar_type()), a[i]), b[i]);
      const auto wide = base[i](x);
      x = torch::tanh(wide + low.to(wide.scalar_type()));
    }
    return x;
  }
  std::vector<nn::Linear> base;
  std::vector<torch::Tensor> a, b;
};

torch::Tensor batch(int rank, int step) {
  torch::manual_seed(seed_of(step, rank));
  return torch::randn({4, 8});
}

}  // namespace

RANKS_TEST("unsharded parameters train as in the plain model", "[wrappers][unsharded][quick]", 1, 2, 3, 4) {
  for (const bool frozen : {true, false})
    for (const bool before : {true, false}) {
      ParityOptions options;
      options.optimizer_before_wrapping = before;
      options.max_norm = 0.5;
      options.fsdp = {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .unsharded = fsdp::name_contains("lora_")};
      check_parity<AdaptedImpl>(
          group, [&] { return std::make_shared<AdaptedImpl>(frozen); }, [](int rank, int step) { return batch(rank, step); },
          [](AdaptedImpl& net, const torch::Tensor& x) { return net.forward(x).square().sum(); }, options);
    }
}

RANKS_TEST("unsharded parameters: whole at rest, equal on all ranks, and nothing is reduced for frozen groups",
           "[wrappers][unsharded][quick]", 2, 3) {
  auto recorded = record(group);
  auto net = std::make_shared<AdaptedImpl>();
  fsdp::FullyShardedDataParallel model(net, recorded.group,
                                       {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(),
                                        .mixed_precision = {.param_dtype = torch::kBFloat16},
                                        .unsharded = fsdp::name_contains("lora_")});
  torch::optim::AdamW optimizer(net->parameters(), 1e-2);
  for (int step = 0; step < 3; ++step) {
    recorded.log->clear();
    model(batch(group.rank(), step)).square().sum().backward();
    EXPECT(recorded.log->count("reduce_scatter") == 0, recorded.log->text());
    EXPECT(recorded.log->count("all_reduce") == 1, recorded.log->text());  // one bucket
    optimizer.step();
    optimizer.zero_grad();
    for (size_t i = 0; i < net->a.size(); ++i) {
      EXPECT(net->a[i].sizes() == torch::IntArrayRef({2, 8}) && net->a[i].scalar_type() == torch::kFloat, net->a[i].sizes());
      for (const auto& adapter : {net->a[i], net->b[i]}) {
        auto all = torch::empty({group.world_size() * adapter.numel()});
        group.collectives()->all_gather(all, adapter.detach().reshape({-1}).clone(), "adapters of all ranks").wait();
        for (const auto& other : all.chunk(group.world_size()))
          EXPECT(torch::equal(other, adapter.detach().reshape({-1})), "step " << step << ": adapters differ between ranks");
      }
    }
  }
  EXPECT(model.stats().gradient_bytes == 3 * (2 * 8 + 8 * 2) * 4, model.stats().gradient_bytes << " bytes of gradients");
}
