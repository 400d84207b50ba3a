// Whole parameters: summoning with write-back, unwrapping, moving the wrapper, and values assigned behind its back.

#include <fsdp/fsdp.h>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

const auto kPolicy = fsdp::size_based_auto_wrap_policy(1);

}  // namespace

RANKS_TEST("summon with write-back keeps what operators and pointers wrote", "[wrappers][summon][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
  torch::NoGradGuard no_grad;
  {
    auto full = model.summon_full_params({.write_back = true});
    net->fc1->weight.fill_(2);
    net->fc2->bias.data_ptr<float>()[3] = 7;
    net->fc3->weight.view({-1}).narrow(0, 2, 5).mul_(-1);
  }
  plain->fc1->weight.fill_(2);
  plain->fc2->bias.data_ptr<float>()[3] = 7;
  plain->fc3->weight.view({-1}).narrow(0, 2, 5).mul_(-1);
  expect_same_parameters(model, *plain, group.world_size());
  const auto x = torch::randn({4, 6});
  EXPECT(torch::allclose(model(x), plain->forward(x)), "forward after write-back");
}

RANKS_TEST("summoning one unit gathers that unit", "[wrappers][summon][quick]", 2) {
  auto recorded = record(group);
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, recorded.group, {.auto_wrap_policy = kPolicy});
  recorded.log->clear();
  {
    auto full = model.summon_full_params({.units = {"fc2"}});
    EXPECT(net->fc2->weight.data_ptr<float>() != nullptr, "memory");
  }
  EXPECT(recorded.log->text() == "all_gather unit 'fc2', summon_full_params\n", recorded.log->text());
  expect_contains(error_of([&] { auto full = model.summon_full_params({.units = {"fc9"}}); }), {"no unit 'fc9'", "'fc1', 'fc2', 'fc3'"});
  EXPECT(net->fc1->weight.dim() == 1, "the failed summon left the bracket open");
}

RANKS_TEST("unwrap gives the plain module back, gradients included", "[wrappers][summon][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
  const auto x = torch::randn({4, 6});
  model(x).square().mean().backward();
  plain->forward(x).square().mean().backward();
  std::shared_ptr<MlpImpl> same = model.unwrap();
  EXPECT(same.get() == net.get(), "the same module");
  for (size_t i = 0; i < net->parameters().size(); ++i) {
    const auto p = net->parameters()[i], q = plain->parameters()[i];
    EXPECT(torch::equal(p, q), "values of parameter " << i);
    EXPECT(torch::allclose(p.grad(), q.grad(), 1e-5, 1e-7), "gradient of parameter " << i);
  }
  expect_contains(error_of([&] { model(x); }), {"unwrapped"});
  // Plain training goes on, and the module can be wrapped again.
  net->zero_grad();
  net->forward(x).sum().backward();
  net->zero_grad();
  fsdp::FullyShardedDataParallel again(net, group, {.auto_wrap_policy = kPolicy});
  again(x).sum().backward();
}

RANKS_TEST("the wrapper can be moved, and live inside another module", "[wrappers][summon][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel first(net, group, {.auto_wrap_policy = kPolicy});
  const auto x = torch::randn({4, 6});
  auto loss = first(x).square().mean();
  auto second = std::move(first);
  loss.backward();
  EXPECT(net->fc1->weight.grad().defined(), "backward after the move");
  expect_contains(error_of([&] { first(x); }), {"moved from"});
  second(x).sum().backward();

  struct Outer : nn::Module {
    explicit Outer(const fsdp::ProcessGroup& group) {
      inner = register_module(
          "inner", std::make_shared<fsdp::FullyShardedDataParallel<MlpImpl>>(Mlp(), group, fsdp::FsdpOptions{.auto_wrap_policy = kPolicy}));
      head = register_module("head", nn::Linear(3, 1));
    }
    torch::Tensor forward(torch::Tensor x) { return head((*inner)(x)); }
    std::shared_ptr<fsdp::FullyShardedDataParallel<MlpImpl>> inner;
    nn::Linear head{nullptr};
  };
  Outer outer(group);
  torch::optim::SGD optimizer(outer.parameters(), 0.1);
  outer.forward(x).sum().backward();
  optimizer.step();
  outer.zero_grad();
  outer.eval();
  EXPECT(!outer.inner->module()->is_training(), "eval reaches the module inside");
}

RANKS_TEST("values assigned at rest are taken over or refused by name", "[wrappers][summon][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
  const auto value = torch::randn({8, 6});
  net->fc1->weight.set_data(value.clone());
  plain->fc1->weight.set_data(value.clone());
  const auto x = torch::randn({4, 6});
  EXPECT(torch::allclose(model(x), plain->forward(x)), "a value of the full shape");
  expect_same_parameters(model, *plain, group.world_size());

  // A file written by the plain model, loaded into the sharded one.
  Mlp other;
  std::stringstream file;
  torch::save(other, file);
  torch::load(net, file);
  EXPECT(torch::allclose(model(x), other->forward(x)), "loaded from a file");

  net->fc2->weight.set_data(torch::zeros({3, 3}));
  expect_contains(error_of([&] { model(x); }), {"fc2.weight", "[3, 3]", "[8, 8]", "while sharded"});
  net->fc2->weight.set_data(torch::zeros({8, 8}));
  model(x);
  expect_contains(error_of([&] { net->to(torch::kDouble); }), {"aten::to", "fc1.weight", "slice"});
  net->fc1->weight.set_data(torch::zeros({8, 6}, torch::kDouble));
  expect_contains(error_of([&] { model(x); }), {"fc1.weight", "dtype Double", "dtype Float"});
  net->fc1->weight.set_data(value);
  model(x);
}
