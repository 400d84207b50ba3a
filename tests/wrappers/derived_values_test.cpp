// What is computed from slices is a slice too: usable as optimizers use it, never one rank's answer for the whole.

#include <fsdp/fsdp.h>

#include <sstream>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/rank_part.h"
#include "support/ranks.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;
namespace optim = torch::optim;

namespace {

const auto kEachModule = fsdp::size_based_auto_wrap_policy(1);
using Model = fsdp::FullyShardedDataParallel<MlpImpl>;

Tensor random_input() { return torch::randn({4, 6}); }

void train_step(optim::Optimizer& optimizer, Tensor loss) {
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
}

}  // namespace

// A user logged `p.grad().square().sum()` and saw the norm of a third of the model, without any error.
RANKS_TEST("derived: no way from a slice to a number of one rank", "[wrappers][errors][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net;
  Model model(net, group, {.auto_wrap_policy = kEachModule});
  const auto x = random_input();
  model(x).square().mean().backward();
  Tensor p = net->fc2->weight, grad = p.grad();
  const int64_t n = p.numel();
  torch::NoGradGuard no_grad;

  const std::vector<std::pair<const char*, std::function<Tensor()>>> ways{
      {"arithmetic", [&] { return grad.square().sum(); }},
      {"a scalar factor", [&] { return (p * 0.1).sum(); }},
      {"clone", [&] { return grad.clone().norm(); }},
      {"data and detach", [&] { return (p.data() + 1).detach().mean(); }},
      {"abs and max", [&] { return grad.abs().max(); }},
      {"another dtype", [&] { return p.to(torch::kDouble).sum(); }},
      {"a mask", [&] { return (grad > 0).any(); }},
      {"a view of a result", [&] { return (p * 2).view({-1}).sum(0); }},
      {"softmax", [&] { return p.softmax(0); }},
      {"cumsum of a result", [&] { return (p * 2).cumsum(0); }},
      {"a part of a result", [&] { return (p * 2).narrow(0, 0, 0); }},
      {"optimizer state", [&] { return torch::zeros_like(p).add_(grad).norm(); }},
      {"copied into a plain tensor", [&] { return torch::zeros({n}).copy_(grad).sum(); }},
      {"added to a plain tensor",
       [&] {
         auto plain = torch::zeros({n});
         plain.add_(grad, 2);
         return plain.sum();
       }},
      {"out=",
       [&] {
         auto out = torch::zeros({n});
         torch::mul_out(out, p, grad);
         return out.sum();
       }},
      {"a list written in place",
       [&] {
         auto plain = torch::zeros({n});
         at::_foreach_add_(std::vector<Tensor>{plain}, std::vector<Tensor>{grad});
         return plain.sum();
       }},
      {"a list returned",
       [&] {
         return at::_foreach_mul(std::vector<Tensor>{p, grad}, 2)[1].norm();
       }},
      {"set_data",
       [&] {
         auto other = torch::zeros({3, 3});
         other.set_data(p.clone());
         return other.sum();
       }},
      {"set_", [&] { return torch::zeros({n}).set_(p).sum(); }},
      {"a part of a larger tensor", [&] { return torch::zeros({2 * n + 1}).narrow(0, 1, n).copy_(grad); }},
      {"a flag of no dimensions",
       [&] {
         auto found = torch::zeros({});
         at::_amp_foreach_non_finite_check_and_unscale_(std::vector<Tensor>{grad.clone()}, found, torch::ones({}));
         return found;
       }},
      {"cat",
       [&] {
         return torch::cat({grad.clone(), p.clone()});
       }},
      {"allclose", [&] { return torch::tensor(torch::allclose(p.clone(), grad.clone())); }},
      {"equal", [&] { return torch::tensor(torch::equal(p.clone(), grad.clone())); }},
  };
  for (const auto& [name, way] : ways) {
    if (group.world_size() == 1) {  // a slice is the whole
      way();
      continue;
    }
    try {
      expect_contains(error_of([&] { way(); }), {"sharded parameter 'fc2.weight' (unit 'fc2')", "rank " + std::to_string(group.rank())});
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(name) + ": " + error.what());
    }
  }
  if (group.world_size() > 1) {
    expect_contains(error_of([&] { (p * 2).sum(); }), {"aten::sum of a value computed from sharded parameter 'fc2.weight'", "summon"});
    auto copy = std::make_shared<nn::Module>("copy");
    copy->register_parameter("copied", p.clone());
    expect_contains(error_of([&] { fsdp::FullyShardedDataParallel again(copy, group); }),
                    {"'copied' was computed from slices", "before wrapping"});
  }
  torch::AutoGradMode grad_mode(true);
  Mlp reference;
  {
    auto full = model.summon_full_params();
    copy_values(*reference, *net);
  }
  optim::SGD optimizer(model.parameters(), 0.1), plain_optimizer(reference->parameters(), 0.1);
  optimizer.zero_grad();
  train_step(optimizer, model(x).square().mean());
  train_step(plain_optimizer, reference->forward(x).square().mean());
  expect_same_parameters(model, *reference, group.world_size());
}

RANKS_TEST("derived: averages, backups and sign steps made of slices", "[wrappers][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  Model model(net, group, {.auto_wrap_policy = kEachModule});
  const std::vector<Tensor> ours = model.parameters(), theirs = plain->parameters();
  // Sign of a momentum (Lion), an average of the weights, and steps undone from a backup: all tensor by tensor.
  const auto use = [](const std::vector<Tensor>& parameters, const std::function<Tensor(Tensor)>& forward) {
    torch::manual_seed(2);
    std::vector<Tensor> average, momentum;
    for (const auto& p : parameters) {
      average.push_back(p.detach().clone());
      momentum.push_back(torch::zeros_like(p));
    }
    for (int step = 0; step < 3; ++step) {
      forward(random_input()).square().mean().backward();
      torch::NoGradGuard no_grad;
      std::vector<Tensor> backup;
      for (size_t i = 0; i < parameters.size(); ++i) {
        auto p = parameters[i];
        backup.push_back(p.clone());
        p.add_(torch::sign(momentum[i] * 0.9 + p.grad() * 0.1), -0.01);
        momentum[i].lerp_(p.grad(), 0.01);
        p.copy_(torch::where(p.grad().abs() < 1e-6, backup[i], p));
        average[i] = average[i] * 0.9 + p * 0.1;
        p.mutable_grad().reset();
      }
    }
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) Tensor(parameters[i]).copy_(std::move(average[i]));
  };
  use(ours, [&](Tensor x) { return model(x); });
  use(theirs, [&](Tensor x) { return plain->forward(x); });
  expect_same_parameters(model, *plain, group.world_size());
}

RANKS_TEST("derived: optimizer state saved and loaded goes on, and is state of slices again", "[wrappers][optimizers][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  Model model(net, group, {.auto_wrap_policy = kEachModule});
  auto optimizer = std::make_unique<optim::AdamW>(model.parameters(), 1e-2);
  optim::AdamW plain_optimizer(plain->parameters(), 1e-2);
  const auto state_of = [&](const Tensor& p) -> optim::AdamWParamState& {
    return static_cast<optim::AdamWParamState&>(*optimizer->state().at(p.unsafeGetTensorImpl()));
  };
  for (int step = 0; step < 4; ++step) {
    const auto x = random_input();
    train_step(*optimizer, model(x).square().mean());
    train_step(plain_optimizer, plain->forward(x).square().mean());
    if (group.world_size() > 1)
      expect_contains(error_of([&] { state_of(net->fc3->weight).exp_avg().norm(); }), {"a value computed from", "'fc3.weight'"});
    if (step == 1) {
      std::stringstream file;
      torch::save(*optimizer, file);
      optimizer = std::make_unique<optim::AdamW>(model.parameters(), 5.0);
      torch::load(*optimizer, file);
      static_cast<optim::AdamWOptions&>(optimizer->param_groups()[0].options()).lr(1e-2);
    }
  }
  expect_same_parameters(model, *plain, group.world_size());
}

RANKS_TEST("derived: plain tensors again when the model is unwrapped or gone", "[wrappers][quick]", 1, 2) {
  for (const bool unwrap : {true, false}) {
    Mlp net;
    Tensor kept, part;
    {
      Model first(net, group, {.auto_wrap_policy = kEachModule});
      auto model = std::move(first);
      kept = net->fc2->weight.detach() * 2;
      part = rank_part(kept);
      if (group.world_size() > 1) expect_contains(error_of([&] { kept.sum(); }), {"'fc2.weight'"});
      if (unwrap) model.unwrap();
    }
    EXPECT(torch::equal(kept, part), "values");
    EXPECT((kept + torch::ones({2, 1})).sizes() == torch::IntArrayRef({2, kept.numel()}), "combined with any tensor");
    Mlp other;
    Model model(other, group);
    EXPECT(torch::equal(kept.detach().clone().view({1, -1}).sum(), part.sum()), "nothing of another model's");
    model(random_input()).sum().backward();
  }
}

// An anchor for a penalty was taken outside of the wrapper: one rank's part of it. On the rank that holds a small parameter whole, shapes
// would even fit.
RANKS_TEST("derived: slices do not meet whole parameters inside the wrapper", "[wrappers][errors][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  Model model(net, group, {.auto_wrap_policy = kEachModule, .parameter_writes = fsdp::ParameterWrites::WRITE_THROUGH});
  const auto x = random_input();
  const Tensor anchor = net->fc3->bias.detach().clone();
  const std::string meets = "cannot combine a value computed from sharded parameter 'fc3.bias' (unit 'fc3') with a gathered parameter";
  expect_contains(error_of([&] { model.call([&](MlpImpl& m) { return (m.fc3->bias - anchor).square().sum(); }); }),
                  {meets, "parameters are whole here", "whole copies of parameters are made inside"});

  model(x).square().mean().backward();
  optim::SGD optimizer(model.parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
  expect_contains(error_of([&] { model.call([&](MlpImpl&) { optimizer.step(); }); }),
                  {"aten::add_ cannot combine the gradient of sharded parameter 'fc1.weight'", "with a gathered parameter of shape [8, 6]",
                   "parameters are whole here", "Optimizers step", "outside of model(x)"});
  optimizer.step();
  optimizer.zero_grad();
  train_step(plain_optimizer, plain->forward(x).square().mean());
  expect_same_parameters(model, *plain, group.world_size());
}
