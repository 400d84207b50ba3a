// Mixed precision against the same thing by hand: fp32 masters, cast, compute, gradients summed up in fp32 in rank order, one step on
// the masters.

#include <fsdp/fsdp.h>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

// Norms of every kind among linears; `by_hand` casts around the norms, as the library is to do by itself.
struct NormedImpl : nn::Module {
  explicit NormedImpl(bool by_hand_ = false) : by_hand(by_hand_) {
    fc1 = register_module("fc1", nn::Linear(6, 8));
    layer = register_module("layer", nn::LayerNorm(nn::LayerNormOptions({8})));
    fc2 = register_module("fc2", nn::Linear(8, 8));
    batch = register_module("batch", nn::BatchNorm1d(8));
    group = register_module("group", nn::GroupNorm(2, 8));
    rms = register_parameter("rms", torch::ones({8}));
    fc3 = register_module("fc3", nn::Linear(8, 3));
  }
  template <class F>
  torch::Tensor wide(F f, const torch::Tensor& x) {
    return by_hand ? f(x.to(torch::kFloat)).to(x.scalar_type()) : f(x);
  }
  torch::Tensor forward(torch::Tensor x) {
    x = wide([&](auto x) { return layer(x); }, torch::tanh(fc1(x)));
    x = wide([&](auto x) { return batch(x); }, fc2(x));
    x = wide([&](auto x) { return group(x); }, x);
    x = x * torch::rsqrt(x.square().mean(-1, true) + 1e-5);
    x = wide([&](auto x) { return x * rms; }, x);
    return fc3(torch::relu(x));
  }
  bool by_hand;
  nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
  nn::LayerNorm layer{nullptr};
  nn::BatchNorm1d batch{nullptr};
  nn::GroupNorm group{nullptr};
  torch::Tensor rms;
};

bool is_kept(const std::string& name) { return name.find("fc") == std::string::npos; }

torch::Tensor input(int rank, int step) {
  torch::manual_seed(seed_of(step, rank));
  return torch::randn({5, 6});
}

void check_against_hand(fsdp::ProcessGroup& group, torch::Dtype dtype, const fsdp::FsdpOptions& options) {
  const int world_size = group.world_size();
  torch::manual_seed(3);
  auto net = std::make_shared<NormedImpl>(), master = std::make_shared<NormedImpl>(true);
  copy_values(*master, *net);
  std::vector<std::shared_ptr<NormedImpl>> copies;  // one per rank, in the compute dtype
  for (int rank = 0; rank < world_size; ++rank) copies.push_back(std::make_shared<NormedImpl>(true));
  fsdp::FullyShardedDataParallel model(net, group, options);
  torch::optim::AdamW optimizer(model.parameters(), 1e-2), master_optimizer(master->parameters(), 1e-2);

  for (int step = 0; step < 5; ++step) {
    auto loss = model(input(group.rank(), step)).square().mean();  // the input is fp32
    EXPECT(loss.scalar_type() == dtype, "the loss has dtype " << loss.scalar_type());
    loss.backward();
    for (const auto& p : model.parameters()) EXPECT(p.grad().scalar_type() == torch::kFloat, "a gradient in " << p.grad().scalar_type());
    optimizer.step();
    optimizer.zero_grad();

    std::vector<torch::Tensor> sums(master->parameters().size());
    for (int rank = 0; rank < world_size; ++rank) {
      auto& copy = *copies[rank];
      {
        torch::NoGradGuard no_grad;
        const auto values = master->named_parameters();
        for (auto& item : copy.named_parameters())
          item.value().set_data(is_kept(item.key()) ? values[item.key()].clone() : values[item.key()].to(dtype));
      }
      copy.zero_grad();
      auto value = copy.forward(input(rank, step).to(dtype)).square().mean();
      value.backward();
      if (rank == group.rank())
        EXPECT(
            value.item<float>() == loss.item<float>() || (world_size > 1 && std::abs(value.item<float>() / loss.item<float>() - 1) < 1e-2),
            "step " << step << ": " << loss.item<float>() << " instead of " << value.item<float>());
      for (size_t i = 0; i < sums.size(); ++i) {
        const auto part = copy.parameters()[i].grad().to(torch::kFloat) / world_size;
        sums[i] = sums[i].defined() ? sums[i] + part : part;
      }
    }
    for (size_t i = 0; i < sums.size(); ++i) master->parameters()[i].mutable_grad() = sums[i];
    master_optimizer.step();
    expect_same_buffers(*net, *copies[group.rank()], 1);  // statistics of BatchNorm in fp32, counters exact
  }
  fsdp::FullyShardedDataParallel<NormedImpl>* wrapper = &model;
  auto plain = wrapper->unwrap();
  const auto want = master->named_parameters();
  for (const auto& item : plain->named_parameters()) {
    EXPECT(item.value().scalar_type() == torch::kFloat, item.key() << " is " << item.value().scalar_type());
    EXPECT(torch::equal(item.value(), want[item.key()]),
           item.key() << " differs from the one by hand by " << (item.value() - want[item.key()]).abs().max().item<float>());
  }
}

}  // namespace

RANKS_TEST("bf16 and fp16 with fp32 norms among them are bit-equal to the same by hand", "[wrappers][precision][quick]", 1, 2, 3, 4) {
  for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
    const fsdp::MixedPrecision precision{.param_dtype = dtype, .keep_fp32 = [](std::string_view name) { return name == "rms"; }};
    check_against_hand(group, dtype, {.mixed_precision = precision});
    check_against_hand(group, dtype, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1), .mixed_precision = precision});
    check_against_hand(group, dtype,
                       {.sharding_strategy = fsdp::ShardingStrategy::SHARD_GRAD_OP,
                        .auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(),
                        .mixed_precision = precision});
  }
}

RANKS_TEST("statistics of BatchNorm under bf16 follow those of fp32", "[wrappers][precision]", 1, 2) {
  const auto train = [&](const fsdp::MixedPrecision& precision) {
    torch::manual_seed(3);
    auto net = std::make_shared<NormedImpl>();
    fsdp::FullyShardedDataParallel model(net, group, {.mixed_precision = precision});
    torch::optim::SGD optimizer(model.parameters(), 1e-3);
    for (int step = 0; step < 400; ++step) {
      model(input(group.rank(), step)).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    EXPECT(net->batch->num_batches_tracked.item<int64_t>() == 400, net->batch->num_batches_tracked.item<int64_t>());
    return net;
  };
  const auto full = train({}), mixed = train({.param_dtype = torch::kBFloat16});
  for (const auto& [got, want] :
       {std::pair(mixed->batch->running_mean, full->batch->running_mean), std::pair(mixed->batch->running_var, full->batch->running_var)}) {
    EXPECT(got.scalar_type() == torch::kFloat, got.scalar_type());
    EXPECT(torch::allclose(got, want, 1e-2, 1e-2), (got - want).abs().max().item<float>());
  }
}

RANKS_TEST("reduce, buffer and output dtypes", "[wrappers][precision][quick]", 1, 2, 3) {
  auto net = std::make_shared<NormedImpl>();
  fsdp::FullyShardedDataParallel model(net, group,
                                       {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                                            .reduce_dtype = torch::kBFloat16,
                                                            .buffer_dtype = torch::kBFloat16,
                                                            .output_dtype = torch::kFloat}});
  EXPECT(net->batch->running_mean.scalar_type() == torch::kBFloat16, net->batch->running_mean.scalar_type());
  EXPECT(net->batch->num_batches_tracked.scalar_type() == torch::kLong, "an integer buffer changed its dtype");
  net->batch->running_mean.set_data(net->batch->running_mean.to(torch::kFloat));  // LibTorch wants these beside fp32 weights
  net->batch->running_var.set_data(net->batch->running_var.to(torch::kFloat));
  const auto output = model(input(group.rank(), 0));
  EXPECT(output.scalar_type() == torch::kFloat, output.scalar_type());
  output.square().mean().backward();
  EXPECT(net->fc1->weight.grad().scalar_type() == torch::kFloat, "the gradient of an fp32 master");
  if (group.world_size() > 1) {
    const auto plan = model.plan();
    int64_t expected = 0;
    for (const auto& g : plan.units[0].groups) expected += (g.shard_numel + g.counts_numel) * group.world_size() * 2;
    EXPECT(model.stats().collectives.reduce_scatter.bytes == expected, model.stats().collectives.reduce_scatter.bytes);
  }
}

RANKS_TEST("frozen parameters are kept in the compute dtype, unless their master is asked for", "[wrappers][precision][quick]", 1, 2, 3) {
  for (const bool keep : {false, true}) {
    Mlp net(64);
    for (auto& p : net->fc2->parameters()) p.set_requires_grad(false);
    fsdp::FullyShardedDataParallel model(net, group,
                                         {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(),
                                          .mixed_precision = {.param_dtype = torch::kBFloat16, .keep_frozen_master = keep}});
    EXPECT(net->fc2->weight.scalar_type() == (keep ? torch::kFloat : torch::kBFloat16), net->fc2->weight.scalar_type());
    model(torch::randn({3, 6})).sum().backward();
    net->fc2->weight.set_requires_grad(true);
    if (keep) {
      model(torch::randn({3, 6})).sum().backward();
      EXPECT(net->fc2->weight.grad().defined(), "thawed, without a gradient");
    } else {
      expect_contains(error_of([&] { model(torch::randn({3, 6})); }), {"'fc2.weight'", "keep_frozen_master = true", "rank "});
      net->fc2->weight.set_requires_grad(false);
      model(torch::randn({3, 6})).sum().backward();  // it still trains
    }
  }
}

RANKS_TEST("a dtype that is none to compute in is refused", "[wrappers][precision][errors][quick]", 1, 2) {
  expect_contains(error_of([&] { fsdp::FullyShardedDataParallel(Mlp(), group, {.mixed_precision = {.param_dtype = torch::kInt}}); }),
                  {"MixedPrecision::param_dtype is Int", "floating dtype", "rank "});
}
