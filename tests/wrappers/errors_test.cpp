// Misuse gets an error that says what is wrong and what to call instead, and leaves the model usable.

#include <fsdp/fsdp.h>

#include <thread>

#include "support/expect_contains.h"
#include "support/expect_trains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

template <class Model>
void expect_trains(Model& model, const fsdp::ProcessGroup& group) {
  fsdp::testing::expect_trains(model, group, std::make_shared<MlpImpl>(), [] { return torch::randn({4, 6}); });
}

}  // namespace

RANKS_TEST("outside the wrapper parameters are slices, and say so", "[wrappers][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  model(torch::randn({4, 6})).square().mean().backward();

  const auto raw_module = error_of([&] { net->forward(torch::randn({4, 6})); });
  expect_contains(raw_module, {"fc1.weight", "rank " + std::to_string(group.rank()) + "'s slice", "model(x)", "call"});
  {
    torch::NoGradGuard no_grad;
    expect_contains(error_of([&] { net->forward(torch::randn({4, 6})); }), {"aten::addmm", "fc1.bias", "[4, 6]", "slice", "model(x)"});
  }
  const auto penalty = error_of([&] {
    auto sum = torch::zeros({});
    for (auto& p : net->parameters()) sum = sum + p.square().sum();
  });
  expect_contains(penalty, {"fc1.weight", "autograd graph", "model.call"});
  if (group.world_size() > 1) {
    expect_contains(error_of([&] { nn::utils::clip_grad_norm_(net->parameters(), 1.0); }),
                    {"gradient", "unit 'fc1'", "one rank only", "model.clip_grad_norm_"});
    expect_contains(error_of([&] { nn::utils::clip_grad_norm_(net->parameters(), 1.0, INFINITY); }),
                    {"unit 'fc1'", "model.clip_grad_norm_"});
    torch::NoGradGuard no_grad;
    expect_contains(error_of([&] { net->fc2->bias.norm(); }), {"fc2.bias", "summon_full_params"});
    expect_contains(error_of([&] { torch::equal(net->fc2->bias, net->fc2->bias); }), {"fc2.bias", "one rank only"});
  }
  model.module()->zero_grad();
  expect_trains(model, group);
}

RANKS_TEST("data_ptr() of an absent parameter names unit and remedy", "[wrappers][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  model.call([&](MlpImpl& m) {
    expect_contains(error_of([&] { m.fc2->weight.data_ptr(); }), {"unit 'fc2'", "not gathered", "summon_full_params"});
    expect_contains(error_of([&] { m.fc2->weight.data_ptr<float>(); }), {"unit 'fc2'", "not gathered"});
    return 0;
  });
  {
    auto full = model.summon_full_params();
    EXPECT(net->fc2->weight.data_ptr<float>() != nullptr, "summoned parameters have memory");
    EXPECT(net->fc2->weight.sizes() == torch::IntArrayRef({8, 8}), net->fc2->weight.sizes());
    EXPECT(group.world_size() == 1 || model.stats().resident_unsharded_bytes == model.plan().unsharded_bytes(),
           "the whole model is gathered");
  }
  EXPECT(model.stats().resident_unsharded_bytes == 0, "summoning leaves nothing behind");
  expect_trains(model, group);
}

RANKS_TEST("writing to a gathered parameter is refused", "[wrappers][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  torch::NoGradGuard no_grad;
  const auto write = [](MlpImpl& m) {
    m.fc2->bias.zero_();
    return 0;
  };
  expect_contains(error_of([&] { model.call(write); }), {"aten::zero_", "fc2.bias"});
  expect_contains(error_of([&] {
                    model.call([](MlpImpl& m) {
                      m.fc2->weight.view({-1}).narrow(0, 1, 2).fill_(1);
                      return 0;
                    });
                  }),
                  {"aten::fill_", "fc2.weight"});
  expect_contains(error_of([&] {
                    auto full = model.summon_full_params();
                    net->fc3->bias.add_(1);
                  }),
                  {"aten::add_", "fc3.bias"});
  torch::AutoGradMode grad(true);
  expect_trains(model, group);
}

RANKS_TEST("wrapping twice, and wrapping nothing", "[wrappers][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  expect_contains(error_of([&] { fsdp::FullyShardedDataParallel again(net, group); }),
                  {"fc1.weight", "sharded already", "Wrap a model once"});
  expect_contains(error_of([&] { fsdp::FullyShardedDataParallel part(net->fc2, group); }), {"sharded already"});
  expect_contains(error_of([&] { fsdp::FullyShardedDataParallel empty(nn::ReLU(), group); }),
                  {"registers no parameters", "register_parameter"});
  expect_contains(error_of([&] { fsdp::FullyShardedDataParallel null(Mlp(nullptr), group); }), {"got no module"});
  Mlp with_gradient;
  with_gradient->forward(torch::randn({2, 6})).sum().backward();
  expect_contains(error_of([&] { fsdp::FullyShardedDataParallel late(with_gradient, group); }),
                  {"fc1.weight", "already has a gradient", "zero_grad()"});
  expect_trains(model, group);
}

RANKS_TEST("members that would act on slices name the right call", "[wrappers][errors][quick]", 1) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  expect_contains(error_of([&] { model.to(torch::kDouble); }), {"before wrapping"});
  expect_contains(error_of([&] { model.to(torch::kCPU); }), {"before wrapping"});
  torch::serialize::OutputArchive archive;
  expect_contains(error_of([&] { model.save(archive); }), {"fsdp::save_weights(model, \"folder\")", "fsdp::save_checkpoint"});
  expect_contains(error_of([&] { model.clone(); }), {"before wrapping"});
  expect_contains(error_of([&] { model.clip_grad_norm_(-1.0); }), {"max_norm must be at least 0, got -1"});
}

RANKS_TEST("different models on two ranks: an error on all within 2 s, the module unchanged", "[wrappers][errors][quick]", 2, 3) {
  Mlp net(group.rank() == 1 ? 9 : 8);
  const auto before = net->fc1->weight.clone();
  const auto start = std::chrono::steady_clock::now();
  const auto text = error_of([&] { fsdp::FullyShardedDataParallel model(net, group); });
  EXPECT(std::chrono::steady_clock::now() - start < std::chrono::seconds(2), "too late");
  expect_contains(text, {"different models", "rank 1: unit '', Float computing in Float, reducing in Float, trainable: fc1.weight [9, 6]",
                         "fc1.weight [8, 6]"});
  EXPECT(torch::equal(before, net->fc1->weight), "the module changed");
  net->forward(torch::randn({2, 6})).sum().backward();

  Mlp other;  // the group is as good as before
  fsdp::FullyShardedDataParallel model(other, group);
  expect_trains(model, group);
}

RANKS_TEST("a model that one rank cannot wrap is an error on all ranks", "[wrappers][errors][quick]", 2, 3) {
  Mlp net;
  if (group.rank() == 1) net->forward(torch::randn({2, 6})).sum().backward();
  const auto text = error_of([&] { fsdp::FullyShardedDataParallel model(net, group); });
  expect_contains(text, {"rank 1: parameter 'fc1.weight' already has a gradient"});
  if (group.rank() != 1) expect_contains(text, {"another rank cannot wrap the model"});
  net->zero_grad();
  fsdp::FullyShardedDataParallel model(net, group);
  expect_trains(model, group);
}

RANKS_TEST("a failed forward or backward leaves a model that trains", "[wrappers][errors][quick]", 1, 2) {
  struct Fails : torch::autograd::Function<Fails> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, torch::Tensor x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list) {
      throw std::runtime_error("this backward fails");
    }
  };
  torch::manual_seed(2);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  const auto x = torch::randn({4, 6});
  const auto failing = [&](MlpImpl& m) { return m.fc3(Fails::apply(m.fc2(torch::tanh(m.fc1(x))))).sum(); };
  auto loss = model.call(failing);
  expect_contains(error_of([&] { loss.backward(); }), {"this backward fails"});
  expect_contains(error_of([&] {
                    model.call([&](MlpImpl& m) -> torch::Tensor {
                      m.fc1(x);
                      throw std::runtime_error("this forward fails");
                    });
                  }),
                  {"this forward fails"});
  model.zero_grad();
  torch::optim::SGD optimizer(model.parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
  for (int step = 0; step < 2; ++step) {
    model(x).square().mean().backward();
    plain->forward(x).square().mean().backward();
    optimizer.step();
    plain_optimizer.step();
    optimizer.zero_grad();
    plain_optimizer.zero_grad();
  }
  expect_same_parameters(model, *plain, group.world_size());
}
