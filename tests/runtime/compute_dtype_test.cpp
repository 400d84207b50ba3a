// Parameters gathered in bf16 over fp32 shards. The reference keeps an fp32 master by hand: cast, compute, cast the gradients back,
// step on the master.

#include <fsdp/fsdp.h>

#include "runtime/sharded_model.h"
#include "support/models.h"
#include "support/ranks.h"
#include "wrappers/wrap_model.h"

using namespace fsdp::testing;

RANKS_TEST("bf16 compute dtype: gradients reach the fp32 shards", "[runtime][quick]", 1, 2, 3) {
  torch::manual_seed(11);
  Mlp net, master;
  Mlp compute[3];
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < net->parameters().size(); ++i) master->parameters()[i].copy_(net->parameters()[i]);
  }
  const int world_size = group.world_size();
  const auto input = [](int rank, int step) {
    torch::manual_seed(50 * step + rank);
    return torch::randn({5, 6}).to(torch::kBFloat16);
  };
  auto wrapped = fsdp::wrap_model(
      *net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1), .mixed_precision = {.param_dtype = torch::kBFloat16}});
  torch::optim::AdamW optimizer(net->parameters(), 1e-2), master_optimizer(master->parameters(), 1e-2);

  for (int step = 0; step < 4; ++step) {
    torch::Tensor loss;
    {
      fsdp::ComputingBracket bracket(wrapped.model);
      EXPECT(net->fc1->weight.scalar_type() == torch::kBFloat16, "compute dtype");
      loss = net->forward(input(group.rank(), step)).square().mean();
    }
    EXPECT(net->fc1->weight.scalar_type() == torch::kFloat, "the shard's dtype");
    loss.backward();
    EXPECT(net->fc1->weight.grad().scalar_type() == torch::kFloat, "the gradient's dtype");
    optimizer.step();
    optimizer.zero_grad();

    for (int r = 0; r < world_size; ++r) {
      {
        torch::NoGradGuard no_grad;
        compute[r]->to(torch::kBFloat16);
        for (size_t i = 0; i < master->parameters().size(); ++i) compute[r]->parameters()[i].copy_(master->parameters()[i]);
      }
      compute[r]->zero_grad();
      auto value = compute[r]->forward(input(r, step)).square().mean();
      value.backward();
      if (r == group.rank())
        EXPECT(world_size > 1 || value.item<float>() == loss.item<float>(),
               "step " << step << ": " << loss.item<float>() << " instead of " << value.item<float>());
    }
    for (size_t i = 0; i < master->parameters().size(); ++i) {
      torch::Tensor mean;
      for (int r = 0; r < world_size; ++r) {
        auto part = compute[r]->parameters()[i].grad().to(torch::kFloat);
        if (world_size > 1) part = part / world_size;
        mean = r ? mean + part : part;
      }
      master->parameters()[i].mutable_grad() = mean;
    }
    master_optimizer.step();
  }
  // At rest: compare slices with the same slice of the master, world size 1 bit for bit.
  fsdp::ComputingBracket bracket(wrapped.model);
  torch::NoGradGuard no_grad;
  for (size_t i = 0; i < master->parameters().size(); ++i) {
    const auto got = net->parameters()[i].to(torch::kFloat), want = master->parameters()[i].to(torch::kBFloat16).to(torch::kFloat);
    if (world_size == 1) EXPECT(torch::equal(got, want), "parameter " << i << " differs by " << (got - want).abs().max().item<double>());
    // One bf16 rounding apart where the sums differ in the last bit of fp32.
    EXPECT(torch::allclose(got, want, 1e-2, 1e-5), "parameter " << i << " differs by " << (got - want).abs().max().item<double>());
  }
}
