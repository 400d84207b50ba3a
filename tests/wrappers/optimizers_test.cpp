// Every optimizer of torch::optim that works tensor by tensor, built before and after wrapping, gives the numbers of plain training.

#include <fsdp/fsdp.h>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/rank_part.h"
#include "support/ranks.h"

using namespace fsdp::testing;
namespace F = torch::nn::functional;
namespace optim = torch::optim;

namespace {

using Parameters = std::vector<torch::Tensor>;
using Pointer = std::unique_ptr<optim::Optimizer>;

const std::vector<std::pair<std::string, MakeOptimizer>> kOptimizers{
    {"SGD", [](Parameters p) -> Pointer { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.05)); }},
    {"SGD with momentum and weight decay",
     [](Parameters p) -> Pointer {
       return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.05).momentum(0.9).dampening(0.1).weight_decay(0.01));
     }},
    {"SGD with momentum", [](Parameters p) -> Pointer { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.05).momentum(0.9)); }},
    {"SGD with Nesterov's momentum",
     [](Parameters p) -> Pointer { return std::make_unique<optim::SGD>(p, optim::SGDOptions(0.05).momentum(0.9).nesterov(true)); }},
    {"Adam with weight decay",
     [](Parameters p) -> Pointer { return std::make_unique<optim::Adam>(p, optim::AdamOptions(1e-2).weight_decay(0.01)); }},
    {"Adam with amsgrad", [](Parameters p) -> Pointer { return std::make_unique<optim::Adam>(p, optim::AdamOptions(1e-2).amsgrad(true)); }},
    {"AdamW with amsgrad",
     [](Parameters p) -> Pointer { return std::make_unique<optim::AdamW>(p, optim::AdamWOptions(1e-2).amsgrad(true)); }},
    {"AdamW in two groups",
     [](Parameters p) -> Pointer {
       Parameters even, odd;
       for (size_t i = 0; i < p.size(); ++i) (i % 2 ? odd : even).push_back(p[i]);
       std::vector<optim::OptimizerParamGroup> groups;
       groups.emplace_back(odd, std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(2e-2).weight_decay(0)));
       groups.emplace_back(even, std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(1e-2).weight_decay(0.1)));
       return std::make_unique<optim::AdamW>(groups, optim::AdamWOptions(1e-2));
     }},
    {"RMSprop", [](Parameters p) -> Pointer { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(1e-2)); }},
    {"RMSprop, centred, with momentum",
     [](Parameters p) -> Pointer { return std::make_unique<optim::RMSprop>(p, optim::RMSpropOptions(1e-3).centered(true).momentum(0.9)); }},
    {"Adagrad",
     [](Parameters p) -> Pointer {
       return std::make_unique<optim::Adagrad>(p, optim::AdagradOptions(1e-2).lr_decay(0.1).initial_accumulator_value(0.1));
     }},
};

template <class Impl, class Batch, class Loss>
void check_all(fsdp::ProcessGroup& group, Batch batch, Loss loss, ParityOptions options) {
  options.after_wrapping = [](optim::Optimizer& optimizer, const fsdp::FullyShardedBase& model) {
    fsdp::shard_optimizer_state(optimizer, model);
  };
  for (const auto& [name, make_optimizer] : kOptimizers)
    for (const bool before : {true, false}) {
      options.make_optimizer = make_optimizer;
      options.optimizer_before_wrapping = before;
      try {
        check_parity<Impl>(
            group, [] { return std::make_shared<Impl>(); }, batch, loss, options);
      } catch (const std::exception& error) {
        throw std::runtime_error(name + (before ? ", built before wrapping: " : ", built after wrapping: ") + error.what());
      }
    }
}

struct Labelled {
  torch::Tensor input, target;
};

Labelled vectors(int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  return {torch::randn({5, 6}), torch::randint(0, 3, {5})};
}

Labelled texts(int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  auto ids = torch::randint(0, TiedGptImpl::kVocabulary, {3, TiedGptImpl::kLength + 1});
  return {ids.slice(1, 0, TiedGptImpl::kLength), ids.slice(1, 1)};
}

void train(optim::Optimizer& optimizer, const std::function<torch::Tensor(torch::Tensor)>& forward, int steps, uint64_t seed) {
  torch::manual_seed(seed);
  for (int step = 0; step < steps; ++step) {
    forward(torch::randn({4, 6})).square().mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

const auto kPolicy = fsdp::size_based_auto_wrap_policy(1);

}  // namespace

RANKS_TEST("optimizers: each on the MLP, built before and after wrapping", "[wrappers][optimizers][quick]", 1, 2, 3, 4) {
  check_all<MlpImpl>(group, vectors,
                     [](MlpImpl& m, const Labelled& batch) { return F::cross_entropy(m.forward(batch.input), batch.target); },
                     {.fsdp = {.auto_wrap_policy = kPolicy}});
}

// Key biases cancel out of the softmax: their true gradient is zero, and optimizers that divide by its size move them by noise.
RANKS_TEST("optimizers: each on the GPT with tied embedding, built before and after wrapping", "[wrappers][optimizers]", 1, 2, 3, 4) {
  check_all<TiedGptImpl>(
      group, texts,
      [](TiedGptImpl& m, const Labelled& batch) { return F::cross_entropy(m.forward(batch.input).flatten(0, 1), batch.target.flatten()); },
      {.fsdp = {.auto_wrap_policy = fsdp::module_wrap_policy<EmbedImpl, GptBlockImpl, TiedHeadImpl>()},
       .skip = {"blocks.0.key.bias", "blocks.1.key.bias"}});
}

RANKS_TEST("optimizers: one that has stepped before wrapping goes on where it was", "[wrappers][optimizers][quick]", 1, 2, 3, 4) {
  for (const auto& [name, make_optimizer] : kOptimizers) {
    torch::manual_seed(1);
    Mlp net, plain;
    copy_values(*plain, *net);
    const auto optimizer = make_optimizer(net->parameters()), plain_optimizer = make_optimizer(plain->parameters());
    const auto forward_plain = [&](torch::Tensor x) { return plain->forward(x); };
    train(
        *optimizer, [&](torch::Tensor x) { return net->forward(x); }, 2, 5);
    fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
    fsdp::shard_optimizer_state(*optimizer, model);
    fsdp::shard_optimizer_state(*optimizer, model);  // a second time changes nothing
    train(
        *optimizer, [&](torch::Tensor x) { return model(x); }, 3, 6);
    train(*plain_optimizer, forward_plain, 2, 5);
    train(*plain_optimizer, forward_plain, 3, 6);
    try {
      expect_same_parameters(model, *plain, group.world_size());
    } catch (const std::exception& error) {
      throw std::runtime_error(name + ": " + error.what());
    }
  }
}

RANKS_TEST("optimizers: a step with state of the full shape names parameter and remedy", "[wrappers][optimizers][errors][quick]", 1, 2, 3) {
  for (const auto& [name, make_optimizer] : kOptimizers) {
    if (name == "SGD") continue;  // has no state
    Mlp net;
    const auto optimizer = make_optimizer(net->parameters());
    train(
        *optimizer, [&](torch::Tensor x) { return net->forward(x); }, 1, 5);
    fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
    model(torch::randn({4, 6})).square().mean().backward();
    const auto before = rank_part(net->fc1->weight);
    const auto error = error_of([&] { optimizer->step(); });
    // AdamW decays the parameter before it looks at its state.
    if (name.find("AdamW") == std::string::npos)
      EXPECT(torch::equal(before, rank_part(net->fc1->weight)), name << ": the failed step changed a parameter");
    expect_contains(error, {"'fc1.", "(unit 'fc1')", "full shape", "shard_optimizer_state(optimizer, model)"});
    // The failed step has begun to change the state, on each rank in another place: it is of no use any more.
    model.zero_grad();
    const auto fresh = make_optimizer(model.parameters());
    train(
        *fresh, [&](torch::Tensor x) { return model(x); }, 1, 5);
  }
}

RANKS_TEST("optimizers: what shard_optimizer_state refuses, it leaves as it was", "[wrappers][optimizers][errors][quick]", 1, 2) {
  Mlp net;
  optim::Adam optimizer(net->parameters(), 1e-2);
  optim::LBFGS lbfgs(net->parameters());
  train(
      optimizer, [&](torch::Tensor x) { return net->forward(x); }, 1, 5);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
  expect_contains(error_of([&] { fsdp::shard_optimizer_state(lbfgs, model); }), {"LBFGS", "cannot train a sharded model", "AdamW"});

  const auto state_of = [&](const torch::Tensor& p) -> optim::AdamParamState& {
    return static_cast<optim::AdamParamState&>(*optimizer.state().at(p.unsafeGetTensorImpl()));
  };
  const auto kept = state_of(net->fc3->bias).exp_avg_sq();
  state_of(net->fc3->bias).exp_avg_sq(torch::zeros({2, 2}));
  expect_contains(error_of([&] { fsdp::shard_optimizer_state(optimizer, model); }), {"exp_avg_sq", "'fc3.bias'", "[2, 2]", "[3]"});
  EXPECT(state_of(net->fc1->weight).exp_avg().sizes() == torch::IntArrayRef({8, 6}), "changed before all checks had passed");
  state_of(net->fc3->bias).exp_avg_sq(kept);
  fsdp::shard_optimizer_state(optimizer, model);
  EXPECT(state_of(net->fc1->weight).exp_avg().sizes() == net->fc1->weight.sizes(), "the slice's shape");

  struct OwnState : optim::OptimizerCloneableParamState<OwnState> {};
  optimizer.state()[net->fc2->bias.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
  expect_contains(error_of([&] { fsdp::shard_optimizer_state(optimizer, model); }), {"a type of its own", "'fc2.bias'", "after wrapping"});
}

// One rank alone loaded a file, or went on training: its moments would be joined with those of the others.
RANKS_TEST("optimizers: state that differs between ranks, or that one rank refuses, is an error on all",
           "[wrappers][optimizers][errors][quick]", 2, 3) {
  torch::manual_seed(1);
  const bool last = group.rank() == group.world_size() - 1;
  enum { kOnOneRankOnly, kOneStepMore, kOtherValues, kRefused };
  for (const int difference : {kOnOneRankOnly, kOneStepMore, kOtherValues, kRefused}) {
    Mlp net;
    optim::AdamW optimizer(net->parameters(), 1e-2);
    const auto forward = [&](torch::Tensor x) { return net->forward(x); };
    const int steps = difference == kOnOneRankOnly ? (last ? 1 : 0) : difference == kOneStepMore ? (last ? 2 : 1) : 1;
    train(optimizer, forward, steps, difference == kOtherValues && last ? 6 : 5);
    auto& state = optimizer.state();
    if (difference == kRefused && last)
      static_cast<optim::AdamWParamState&>(*state.at(net->fc2->weight.unsafeGetTensorImpl())).exp_avg(torch::zeros({2}));
    fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kPolicy});
    const auto text = error_of([&] { fsdp::shard_optimizer_state(optimizer, model); });
    if (difference == kRefused)
      expect_contains(text, {"rank " + std::to_string(group.world_size() - 1), "'fc2.weight' has shape [2]"});
    else
      expect_contains(text, {"different optimizer state for parameter 'fc1.", difference == kOnOneRankOnly ? "nothing" : "step 1"});
    if (steps)
      EXPECT(static_cast<optim::AdamWParamState&>(*state.at(net->fc1->weight.unsafeGetTensorImpl())).exp_avg().dim() == 2, "changed");
    optim::AdamW fresh(model.parameters(), 1e-2);
    train(
        fresh, [&](torch::Tensor x) { return model(x); }, 1, 5);
  }
}

RANKS_TEST("optimizers: LBFGS over ranks is refused by name in its first step", "[wrappers][optimizers][errors][quick]", 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  optim::LBFGS optimizer(model.parameters());
  const auto closure = [&] {
    optimizer.zero_grad();
    auto loss = model(torch::ones({4, 6})).square().mean();
    loss.backward();
    return loss;
  };
  expect_contains(error_of([&] { optimizer.step(closure); }), {"LBFGS", "whole parameters"});
  torch::optim::SGD other(model.parameters(), 0.1);
  train(
      other, [&](torch::Tensor x) { return model(x); }, 1, 5);
}
