// What reuse, missing gradients and odd graphs have broken elsewhere.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"
#include "support/same_use.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;

namespace {

const auto kEachModule = fsdp::size_based_auto_wrap_policy(1);

nn::Linear square_layer() { return nn::Linear(nn::LinearOptions(4, 4).bias(false)); }

struct TwoImpl : nn::Module {
  TwoImpl() {
    a = register_module("a", square_layer());
    b = register_module("b", square_layer());
  }
  nn::Linear a{nullptr}, b{nullptr};
  Tensor h;
};

Tensor random_input(std::vector<int64_t> shape, int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  return torch::randn(shape);
}

}  // namespace

// A unit that went from used to unused stayed gathered, and the step before's gradient was put into its .grad: the action at its end
// hung on a hook that never fired.
RANKS_TEST("B2: a unit that is used in some steps only", "[cases][quick]", 1, 2, 3) {
  using Input = std::pair<Tensor, int>;
  check_parity<TwoImpl>(
      group, [] { return std::make_shared<TwoImpl>(); },
      [](int rank, int step) {
        return Input{random_input({3, 4}, rank, step), step};
      },
      [](TwoImpl& m, const Input& in) {
        auto used = in.second % 2 ? m.b : m.a;
        (in.second % 2 ? m.a : m.b)->forward(in.first);  // its output is not in the loss
        return used(in.first).square().mean();
      },
      {.fsdp = {.auto_wrap_policy = kEachModule}, .steps = 6});
  // Gradients kept over the steps: the unused unit's stays what it was.
  check_same_use<TwoImpl>(
      group, [] { return std::make_shared<TwoImpl>(); },
      [](Use<TwoImpl>& net) -> std::vector<Tensor> {
        torch::optim::Adam optimizer(net.parameters, 0.01);
        std::vector<Tensor> losses;
        for (int step = 0; step < 4; ++step) {
          const auto x = torch::randn({3, 4});
          losses.push_back(net.call([&](TwoImpl& m) { return (step % 2 ? m.b : m.a)->forward(x).square().mean(); }));
          losses.back().backward();
          optimizer.step();
        }
        return losses;
      });
}

// The loss came from a tensor that forward had kept, not from its output, and backward met a storage of size 0: the gather hung on the
// output's gradient, which never came.
RANKS_TEST("B3: a loss from an intermediate that forward kept", "[cases][quick]", 1, 2, 3) {
  check_same_use<TwoImpl>(
      group, [] { return std::make_shared<TwoImpl>(); },
      [](Use<TwoImpl>& net) -> std::vector<Tensor> {
        const auto x = torch::randn({3, 4}).requires_grad_();
        auto output = net.call([&](TwoImpl& m) {
          m.h = m.a(x);
          return m.b(torch::tanh(m.h));
        });
        net.module->h.square().sum().backward();
        EXPECT(net.module->a->weight.grad().defined(), "a");
        EXPECT(!net.module->b->weight.grad().defined(), "b has no part in this loss");
        return {output, x.grad()};
      });
}

// A frozen block that was used several times was freed twice.
RANKS_TEST("B5: a frozen unit used more than once", "[cases][quick]", 1, 2, 3) {
  const auto make = [] {
    auto net = std::make_shared<TwoImpl>();
    net->b->weight.set_requires_grad(false);
    return net;
  };
  const auto loss = [](TwoImpl& m, Tensor x) { return m.b(torch::tanh(m.b(m.a(x)))).square().mean(); };
  check_parity<TwoImpl>(group, make,
                        [](int rank, int step) {
                          return random_input({3, 4}, rank, step);
                        },
                        loss, {.fsdp = {.auto_wrap_policy = kEachModule}});
  if (group.world_size() == 1) return;
  auto recorded = record(group);
  fsdp::FullyShardedDataParallel model(make(), recorded.group, {.auto_wrap_policy = kEachModule});
  recorded.log->clear();
  model.call([&](TwoImpl& m) { return loss(m, torch::ones({3, 4})); }).backward();
  EXPECT(recorded.log->text() ==
             "all_gather unit 'a', forward\n"
             "all_gather unit 'b', forward\n"
             "reduce_scatter unit 'a', backward\n",
         recorded.log->text());
}

// Ranks that took different branches inside a unit packed different gradients: sizes agreed, and sums landed in the wrong parameters.
// A first repair left the gradient unset on some ranks, and only some shards were stepped.
RANKS_TEST("B6: ranks use different weights of one unit", "[cases][quick]", 2, 3, 4) {
  using Input = std::pair<Tensor, bool>;
  const auto loss = [](TwoImpl& m, const Input& in) { return (in.second ? m.a : m.b)->forward(in.first).square().mean(); };
  check_parity<TwoImpl>(
      group, [] { return std::make_shared<TwoImpl>(); },
      [](int rank, int step) {
        return Input{random_input({3, 4}, rank, step), (rank + step) % 2 == 0};
      },
      loss);
}

// autograd::grad went past the reduction, or set off half of it.
RANKS_TEST("B9: autograd::grad communicates no gradient and leaves nothing behind", "[cases][quick]", 1, 2, 3) {
  auto recorded = record(group);
  torch::manual_seed(1);
  auto net = std::make_shared<TwoImpl>(), plain = std::make_shared<TwoImpl>();
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = kEachModule});
  const auto x = torch::randn({3, 4});
  const auto loss = [&](TwoImpl& m) { return m.b(torch::tanh(m.a(x))).square().mean(); };
  auto value = model.call(loss);
  recorded.log->clear();
  const auto grad = torch::autograd::grad({value}, {net->a->weight}, {}, /*retain_graph=*/true)[0];
  EXPECT(recorded.log->count("reduce_scatter") == 0 && recorded.log->count("all_reduce") == 0, recorded.log->text());
  EXPECT(!net->a->weight.grad().defined(), ".grad was written");
  EXPECT(model.stats().resident_unsharded_bytes == 0, "memory kept at rest");
  auto want = loss(*plain);
  want.backward();
  EXPECT(torch::equal(grad, plain->a->weight.grad()), "this rank's own gradient, whole");
  value.backward();
  torch::optim::SGD optimizer(model.parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
  optimizer.step();
  plain_optimizer.step();
  expect_same_parameters(model, *plain, group.world_size());
}

// A forward without arguments failed with an index error, and tensors in nested or own results were not searched for.
RANKS_TEST("B14: no arguments, nested results, structs", "[cases][quick]", 1, 2, 3) {
  struct Result {
    Tensor mean;
    std::map<std::string, std::optional<Tensor>> parts;
  };
  struct Net : TwoImpl {
    Tensor forward() { return a(b->weight).square().mean(); }
    std::tuple<Tensor, std::vector<Tensor>> nested(Tensor x, double scale = 2) { return {a(x), {b(x), a(b(x)) * scale}}; }
    Result own(const Tensor* x, std::string key) { return {a(*x).mean(), {{key, b(*x)}, {"none", std::nullopt}}}; }
  };
  check_same_use<Net>(
      group, [] { return std::make_shared<Net>(); },
      [](Use<Net>& net) -> std::vector<Tensor> {
        const auto x = torch::randn({3, 4});
        torch::optim::SGD optimizer(net.parameters, 0.1);
        std::vector<Tensor> losses;
        for (int step = 0; step < 2; ++step) {
          auto loss = net.call([&](Net& m) {
            auto [first, rest] = m.nested(x);
            auto own = m.own(&x, "b");
            return m.forward() + first.sum() + rest[0].sum() + rest[1].square().sum() + own.mean + own.parts["b"]->sum();
          });
          loss.backward();
          optimizer.step();
          optimizer.zero_grad();
          losses.push_back(loss);
        }
        return losses;
      });
  auto net = std::make_shared<Net>();
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  model().backward();
  model.zero_grad();
  std::get<1>(model->nested(torch::ones({3, 4})))[1].sum().backward();
  EXPECT(net->a->weight.grad().defined() && net->b->weight.grad().defined(), "gradients through ->");
  const Tensor x = torch::ones({3, 4});
  model->own(&x, "b").mean.backward();
}
