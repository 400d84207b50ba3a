// Ways of using autograd: each is run on a plain and on a sharded model and must give the same.

#include <fsdp/fsdp.h>

#include <ATen/autocast_mode.h>

#include <thread>

#include "support/models.h"
#include "support/ranks.h"
#include "support/same_use.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;
namespace ag = torch::autograd;

namespace {

// Saves the parameter itself, unseen by the dispatcher.
struct OwnLinear : ag::Function<OwnLinear> {
  static Tensor forward(ag::AutogradContext* ctx, Tensor x, Tensor w) {
    ctx->save_for_backward({x, w});
    return x.mm(w.t());
  }
  static ag::variable_list backward(ag::AutogradContext* ctx, ag::variable_list g) {
    const auto saved = ctx->get_saved_variables();
    return {g[0].mm(saved[1]), g[0].t().mm(saved[0])};
  }
};

struct NetImpl : nn::Module {
  NetImpl() {
    a = register_module("a", nn::Linear(6, 8));
    b = register_module("b", nn::Linear(8, 8));
    w = register_parameter("w", torch::randn({8, 8}));
    v = register_parameter("v", torch::randn({8, 8}));
    unused = register_module("unused", nn::Linear(3, 3));
  }
  Tensor forward(Tensor x) { return OwnLinear::apply(b(torch::tanh(a(x))), v) * (w * w).mean(); }
  nn::Linear a{nullptr}, b{nullptr}, unused{nullptr};
  Tensor w, v;
};

Tensor input() { return torch::randn({4, 6}); }

template <class Function>
void check(fsdp::ProcessGroup& group, Function use) {
  check_same_use<NetImpl>(
      group, [] { return std::make_shared<NetImpl>(); }, use);
}

using Net = Use<NetImpl>;
using Results = std::vector<Tensor>;

}  // namespace

RANKS_TEST("autograd: several forwards before one backward, repeated and partial backwards", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  check(group, [](Net& net) -> Results {
    const auto one = net(input()).square().mean(), two = net(input()).abs().mean();
    one.backward({}, /*retain_graph=*/true);
    (one + two).backward();
    return {one, two};
  });
  check(group, [](Net& net) -> Results {
    auto y = net(input());
    y.select(0, 0).sum().backward({}, true);
    y.select(0, 1).sum().backward();
    return {y};
  });
}

RANKS_TEST("autograd: second order", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  check(group, [](Net& net) -> Results {
    auto x = input().requires_grad_();
    auto slope = ag::grad({torch::tanh(net(x)).sum()}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
    slope.square().sum().backward();
    return {slope, x.grad()};
  });
}

RANKS_TEST("autograd: grad of parameters leaves .grad alone, backward(inputs) fills what it names", "[runtime][autograd][quick]", 1, 2, 3,
           4) {
  check(group, [](Net& net) -> Results {
    auto loss = net(input()).square().mean();
    auto x = input().requires_grad_();
    auto other = net(x).sum();
    auto grads = ag::grad({loss}, {net.module->a->weight, net.module->w}, {}, true);
    EXPECT(!net.module->a->weight.grad().defined(), "autograd::grad wrote .grad");
    ag::backward({other}, {}, std::nullopt, false, {net.module->b->bias, x});
    return {grads[0], grads[1], x.grad()};
  });
}

RANKS_TEST("autograd: user hooks, set before and after forward", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  check(group, [](Net& net) -> Results {
    auto calls = std::make_shared<int>(0);
    net.module->a->weight.register_hook([calls](Tensor g) {
      ++*calls;
      return g * 2;
    });
    auto loss = net(input()).square().mean();
    net.module->w.register_hook([calls](Tensor g) {
      ++*calls;
      return g + 1;
    });
    loss.backward();
    EXPECT(*calls == 2, *calls << " hook calls");
    return {loss};
  });
}

RANKS_TEST("autograd: backward inside the wrapper's call", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  check(group, [](Net& net) -> Results {
    auto value = net.call([](NetImpl& m) {
      auto x = torch::ones({2, 6}).requires_grad_();
      auto energy = m.forward(x).sum();
      auto force = ag::grad({energy}, {x}, {}, true, true)[0];
      (energy + force.square().sum()).backward();
      auto again = m.forward(x.detach()).sum();
      again.backward();
      return again;
    });
    net(input()).sum().backward();
    return {value};
  });
}

RANKS_TEST("autograd: views and detached handles kept across steps see current values", "[runtime][autograd][quick]", 1, 2) {
  check(group, [](Net& net) -> Results {
    Tensor view, detached;
    net.call([&](NetImpl& m) {
      view = m.w.narrow(0, 1, 3).detach();
      detached = m.a->weight.detach();
      return m.w.sum();
    });
    torch::optim::SGD optimizer(net.parameters, 0.1);
    net(input()).square().mean().backward();
    optimizer.step();
    return {view.clone(), detached.clone(), view.sum()};
  });
}

RANKS_TEST("autograd: InferenceMode and no_grad between training steps", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  check(group, [](Net& net) -> Results {
    Results results;
    torch::optim::SGD optimizer(net.parameters, 0.1);
    for (int step = 0; step < 3; ++step) {
      {
        c10::InferenceMode inference;
        results.push_back(net(input()).clone());
      }
      {
        torch::NoGradGuard no_grad;
        results.push_back(net(input()));
      }
      results.push_back(net(input()));  // evaluation that forgot to switch gradients off
      net(input()).square().mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    }
    for (auto& r : results) r = r.detach().clone();
    return results;
  });
}

RANKS_TEST("autograd: autocast and anomaly mode", "[runtime][autograd][quick]", 1, 2) {
  check(group, [](Net& net) -> Results {
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, torch::kBFloat16);
    torch::optim::SGD optimizer(net.parameters, 0.1);
    Results results;
    for (int step = 0; step < 2; ++step) {
      auto y = net.call([&](NetImpl& m) { return m.b(torch::tanh(m.a(input()))); });
      results.push_back(y.to(torch::kFloat));
      y.to(torch::kFloat).square().mean().backward();
      at::autocast::clear_cache();
      optimizer.step();
    }
    at::autocast::set_autocast_enabled(at::kCPU, false);
    return results;
  });
  check(group, [](Net& net) -> Results {
    ag::DetectAnomalyGuard anomaly;
    auto loss = net(input()).square().mean();
    loss.backward();
    return {loss};
  });
}

RANKS_TEST("autograd: freezing and thawing between steps", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  check(group, [](Net& net) -> Results {
    torch::optim::SGD optimizer(net.parameters, 0.1);
    Results results;
    for (int step = 0; step < 4; ++step) {
      net.module->a->weight.set_requires_grad(step % 2 == 0);
      net.module->w.set_requires_grad(step != 2);
      auto loss = net(input()).square().mean();
      loss.backward();
      results.push_back(loss);
      optimizer.step();
      optimizer.zero_grad();
    }
    net.module->w.set_requires_grad(true);
    return results;
  });
}

// A model that freezes everything first: groups that were frozen when the model was wrapped get gradients later.
RANKS_TEST("autograd: frozen when wrapped, thawed later", "[runtime][autograd][quick]", 1, 2, 3, 4) {
  const auto make = [] {
    auto net = std::make_shared<NetImpl>();
    for (auto& p : net->a->parameters()) p.set_requires_grad(false);
    return net;
  };
  check_same_use<NetImpl>(group, make, [](Net& net) -> Results {
    net(input()).square().mean().backward();
    for (auto& p : net.module->a->parameters()) p.set_requires_grad(true);
    auto loss = net(input()).square().mean();
    loss.backward();
    return {loss};
  });
}

RANKS_TEST("autograd: two models in one graph", "[runtime][autograd][quick]", 1, 2) {
  torch::manual_seed(31);
  Mlp generator, plain_generator;
  nn::Sequential critic(nn::Linear(3, 6), nn::ReLU(), nn::Linear(6, 1)), plain_critic(nn::Linear(3, 6), nn::ReLU(), nn::Linear(6, 1));
  copy_values(*plain_generator, *generator);
  copy_values(*plain_critic, *critic);
  const auto policy = fsdp::size_based_auto_wrap_policy(1);
  fsdp::FullyShardedDataParallel g(generator, group, {.auto_wrap_policy = policy});
  fsdp::FullyShardedDataParallel d(critic, group, {.auto_wrap_policy = policy});
  torch::optim::Adam g_optimizer(g.parameters(), 1e-2), d_optimizer(d.parameters(), 1e-2);
  torch::optim::Adam pg_optimizer(plain_generator->parameters(), 1e-2), pd_optimizer(plain_critic->parameters(), 1e-2);
  for (int step = 0; step < 3; ++step) {
    const auto noise = torch::randn({4, 6}), real = torch::randn({4, 3});
    const auto train = [&](auto make, auto judge, auto& critic_optimizer, auto& generator_optimizer) {
      critic_optimizer.zero_grad();
      (judge(make(noise).detach()).mean() - judge(real).mean()).backward();
      critic_optimizer.step();
      generator_optimizer.zero_grad();
      auto loss = -judge(make(noise)).mean();
      loss.backward();
      generator_optimizer.step();
      return loss.template item<float>();
    };
    const float got = train([&](Tensor x) { return g(x); }, [&](Tensor x) { return d(x); }, d_optimizer, g_optimizer);
    const float want = train([&](Tensor x) { return plain_generator->forward(x); }, [&](Tensor x) { return plain_critic->forward(x); },
                             pd_optimizer, pg_optimizer);
    EXPECT(got == want, "step " << step << ": " << got << " instead of " << want);
  }
  expect_same_parameters(g, *plain_generator, group.world_size());
  expect_same_parameters(d, *plain_critic, group.world_size());
}

RANKS_TEST("autograd: two threads run backward of one model at world size 1", "[runtime][autograd][quick]", 1) {
  torch::manual_seed(41);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  for (int round = 0; round < 20; ++round) {
    const auto x = torch::randn({4, 6}), y = torch::randn({4, 6});
    auto one = model(x).square().mean(), two = model(y).square().mean();
    std::thread other([&] { two.backward(); });
    one.backward();
    other.join();
    plain->forward(x).square().mean().backward();
    plain->forward(y).square().mean().backward();
  }
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    const auto got = net->parameters()[i].grad().clone(), want = plain->parameters()[i].grad().flatten();
    EXPECT(torch::allclose(got, want, 1e-5, 1e-6), "parameter " << i << " differs by " << (got - want).abs().max().item<float>());
  }
}

RANKS_TEST("autograd: a sparse gradient is refused by name", "[runtime][autograd][errors][quick]", 1, 2) {
  struct SparseNet : nn::Module {
    SparseNet() { embedding = register_module("embedding", nn::Embedding(nn::EmbeddingOptions(5, 3).sparse(true))); }
    Tensor forward(Tensor ids) { return embedding(ids); }
    nn::Embedding embedding{nullptr};
  };
  fsdp::FullyShardedDataParallel sparse(std::make_shared<SparseNet>(), group);
  const auto text = error_of([&] { sparse(torch::tensor({1, 2})).sum().backward(); });
  EXPECT(text.find("embedding.weight") != std::string::npos && text.find("sparse(false)") != std::string::npos, text);
}

RANKS_TEST("autograd: backward(create_graph=true) into .grad is refused by name", "[runtime][autograd][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  const auto text = error_of([&] { model(torch::randn({4, 6})).square().sum().backward({}, true, /*create_graph=*/true); });
  EXPECT(text.find("create_graph") != std::string::npos && text.find("autograd::grad") != std::string::npos, text);
}

RANKS_TEST("autograd: an assigned .grad of another shape is refused by name", "[runtime][autograd][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  model(torch::randn({4, 6})).sum().backward();
  net->fc1->weight.mutable_grad() = torch::ones({2, 2});
  const auto text = error_of([&] { model(torch::randn({4, 6})).sum().backward(); });
  EXPECT(text.find("fc1.weight") != std::string::npos && text.find("[2, 2]") != std::string::npos, text);
}

RANKS_TEST("autograd: backward after an optimizer step is noticed as in the plain run", "[runtime][autograd][errors][quick]", 1, 2) {
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  auto loss = model(torch::randn({4, 6})).square().sum();
  torch::optim::AdamW optimizer(model.parameters(), 0.1);  // LibTorch's SGD writes through .data(), which autograd does not see
  model(torch::randn({4, 6})).sum().backward();
  optimizer.step();
  const auto text = error_of([&] { loss.backward(); });
  EXPECT(text.find("modified by an inplace operation") != std::string::npos, text);
}

// .grad assigned by the user is honoured: gradient clipping by value, noise, hand-made gradients.
RANKS_TEST("autograd: an assigned .grad of the right shape is added to", "[runtime][autograd][quick]", 1, 2) {
  torch::manual_seed(51);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group);
  const auto x = torch::randn({4, 6});
  for (int pass = 0; pass < 2; ++pass) {
    model(x).square().mean().backward();
    plain->forward(x).square().mean().backward();
    for (auto& p : model.parameters()) p.mutable_grad() = p.grad().clone() * 3;
    for (auto& p : plain->parameters()) p.mutable_grad() = p.grad().clone() * 3;
  }
  torch::optim::SGD optimizer(model.parameters(), 0.1), plain_optimizer(plain->parameters(), 0.1);
  optimizer.step();
  plain_optimizer.step();
  expect_same_parameters(model, *plain, group.world_size());
}
