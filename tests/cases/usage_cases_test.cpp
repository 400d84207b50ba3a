// What users do between and around steps: evaluation, freezing, edits, other entry points, inference first, modules that go past their
// children's forward.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/same_use.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;

namespace {

const auto kEachModule = fsdp::size_based_auto_wrap_policy(1);

void train_step(torch::optim::Optimizer& optimizer, Tensor loss) {
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
}

void expect_close_output(const Tensor& got, const Tensor& want, const char* when) {
  EXPECT(torch::allclose(got, want, 1e-5, 1e-6), when << ": differs by " << (got - want).abs().max().item<float>());
}

}  // namespace

// A no-grad forward kept the gathered weights. A running average or an edit written to the shards afterwards was not seen by the next
// evaluation, which found everything "already gathered".
RANKS_TEST("E1: evaluation sees what was last written", "[cases][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, average, plain, plain_average;
  for (auto* other : {&average, &plain, &plain_average}) copy_values(**other, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  fsdp::FullyShardedDataParallel ema(average, group, {.auto_wrap_policy = kEachModule});
  torch::optim::AdamW optimizer(model.parameters(), 1e-2), plain_optimizer(plain->parameters(), 1e-2);
  const auto follow = [](std::vector<Tensor> slow, std::vector<Tensor> fast) {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < slow.size(); ++i) slow[i].mul_(0.7).add_(fast[i], 0.3);
  };
  for (int step = 0; step < 3; ++step) {
    const auto x = torch::randn({4, 6});
    train_step(optimizer, model(x).square().mean());
    train_step(plain_optimizer, plain->forward(x).square().mean());
    follow(ema.parameters(), model.parameters());
    follow(plain_average->parameters(), plain->parameters());
    ema.eval();
    torch::NoGradGuard no_grad;
    expect_close_output(ema(x), plain_average->forward(x), "running average");
    expect_close_output(model(x), plain->forward(x), "after a step");
  }
  const auto x = torch::randn({4, 6});
  model(x);  // a forward that no backward follows
  {
    torch::NoGradGuard no_grad;
    expect_close_output(model(x), plain->forward(x), "after a forward without backward");
    for (auto& p : model.parameters()) p.mul_(0.5);
    for (auto& p : plain->parameters()) p.mul_(0.5);
    expect_close_output(model(x), plain->forward(x), "after an edit of the slices");
    {
      auto full = model.summon_full_params({.write_back = true});
      net->fc1->weight.add_(1);
    }
    plain->fc1->weight.add_(1);
    expect_close_output(model(x), plain->forward(x), "after an edit of whole parameters");
  }
  EXPECT(model.stats().resident_unsharded_bytes == 0, "memory kept at rest");
}

// Changes of requires_grad after wrapping were lost after an evaluation, and a layer frozen by dropping its gradient drifted.
RANKS_TEST("E2: freezing and thawing after wrapping", "[cases][quick]", 1, 2, 3) {
  check_same_use<MlpImpl>(
      group, [] { return std::make_shared<MlpImpl>(); },
      [](Use<MlpImpl>& net) -> std::vector<Tensor> {
        torch::optim::Adam optimizer(net.parameters, 1e-2);
        std::vector<Tensor> results;
        const auto train_two = [&] {
          for (int step = 0; step < 2; ++step) {
            results.push_back(net(torch::randn({4, 6})).square().mean());
            train_step(optimizer, results.back());
          }
        };
        const auto set = [&](bool trainable) {
          for (auto& p : net.module->fc1->parameters()) p.set_requires_grad(trainable);
        };
        train_two();
        {
          torch::NoGradGuard no_grad;
          results.push_back(net(torch::randn({4, 6})));
        }
        set(false);
        train_two();
        EXPECT(!net.module->fc1->weight.grad().defined(), "a frozen parameter got a gradient");
        set(true);
        train_two();
        return results;
      });
}

// Writes inside the scope that shows whole parameters were lost.
RANKS_TEST("E4: clamped weights stay clamped", "[cases][quick]", 1, 2, 3) {
  torch::manual_seed(1);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  torch::optim::SGD optimizer(model.parameters(), 1e-2), plain_optimizer(plain->parameters(), 1e-2);
  const auto x = torch::randn({4, 6});
  for (int round = 0; round < 2; ++round) {
    {
      torch::NoGradGuard no_grad;
      auto full = model.summon_full_params({.write_back = true});
      for (auto& p : net->parameters()) p.clamp_(-0.1, 0.1);
      for (auto& p : plain->parameters()) p.clamp_(-0.1, 0.1);
    }
    expect_same_parameters(model, *plain, group.world_size());
    train_step(optimizer, model(x).square().mean());
    train_step(plain_optimizer, plain->forward(x).square().mean());
    expect_same_parameters(model, *plain, group.world_size());
  }
}

// generate and encode on a wrapped module met empty weights.
RANKS_TEST("E5: entry points other than forward", "[cases][quick]", 1, 2, 3) {
  struct Net : MlpImpl {
    Tensor encode(Tensor x) { return torch::tanh(fc1(x)); }
    Tensor generate(Tensor x, int64_t steps) {
      torch::NoGradGuard no_grad;
      for (int64_t i = 0; i < steps; ++i) x = torch::cat({x.slice(1, 3), forward(x)}, 1);
      return x;
    }
  };
  torch::manual_seed(1);
  auto net = std::make_shared<Net>(), plain = std::make_shared<Net>();
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  const auto x = torch::randn({2, 6});
  EXPECT(torch::equal(model->encode(x), plain->encode(x)), "encode");
  EXPECT(torch::equal(model->generate(x, 4), plain->generate(x, 4)), "generate");
  EXPECT(net->fc1->weight.dim() == 1, "slices again afterwards");
  torch::NoGradGuard no_grad;
  model(x);
  EXPECT(model.stats().resident_unsharded_bytes == 0, "memory kept at rest");
  const auto text = error_of([&] { net->fc1->forward(x); });
  EXPECT(text.find("fc1.") != std::string::npos && text.find("model->method(x)") != std::string::npos, text);
}

// A first pass under InferenceMode left buffers that could not be trained with.
RANKS_TEST("E7: inference before the first step, and wrapping under InferenceMode", "[cases][quick]", 1, 2, 3) {
  for (const bool wrap_inside : {false, true}) {
    torch::manual_seed(1);
    Mlp net, plain;
    copy_values(*plain, *net);
    const auto x = torch::randn({4, 6});
    std::unique_ptr<fsdp::FullyShardedDataParallel<MlpImpl>> model;
    const auto wrap = [&] {
      model = std::make_unique<fsdp::FullyShardedDataParallel<MlpImpl>>(net, group, fsdp::FsdpOptions{.auto_wrap_policy = kEachModule});
    };
    if (!wrap_inside) wrap();
    {
      c10::InferenceMode inference;
      if (wrap_inside) wrap();
      EXPECT(torch::equal((*model)(x), plain->forward(x)), "inference");
    }
    torch::optim::AdamW optimizer(model->parameters(), 1e-2), plain_optimizer(plain->parameters(), 1e-2);
    for (int step = 0; step < 2; ++step) {
      train_step(optimizer, (*model)(x).square().mean());
      train_step(plain_optimizer, plain->forward(x).square().mean());
      c10::InferenceMode inference;
      (*model)(x);
    }
    expect_same_parameters(*model, *plain, group.world_size());
  }
}

namespace {

struct NormLayerImpl : nn::Module {
  NormLayerImpl() { weight = register_parameter("weight", torch::rand({4}) + 0.5); }
  Tensor forward(Tensor x);
  Tensor weight;
};
TORCH_MODULE(NormLayer);

// Reads the module's weight anew in backward.
struct RereadingScale : torch::autograd::Function<RereadingScale> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, Tensor x, Tensor w, NormLayerImpl* layer) {
    ctx->save_for_backward({x});
    ctx->saved_data["layer"] = reinterpret_cast<int64_t>(layer);
    return x * w;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list g) {
    auto* layer = reinterpret_cast<NormLayerImpl*>(ctx->saved_data["layer"].toInt());
    return {g[0] * layer->weight, (g[0] * ctx->get_saved_variables()[0]).flatten(0, 1).sum(0), Tensor()};
  }
};
Tensor NormLayerImpl::forward(Tensor x) { return RereadingScale::apply(x, weight, this); }

// Saves the weight.
struct SavingLinear : torch::autograd::Function<SavingLinear> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, Tensor x, Tensor w) {
    ctx->save_for_backward({x, w});
    return x.matmul(w.t());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx, torch::autograd::variable_list g) {
    const auto saved = ctx->get_saved_variables();
    return {g[0].matmul(saved[1]), g[0].flatten(0, 1).t().mm(saved[0].flatten(0, 1))};
  }
};

struct BypassImpl : nn::Module {
  BypassImpl() {
    attention = register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(4, 2)));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(4, 4).num_layers(2)));
    norm = register_module("norm", NormLayer());
    linear = register_module("linear", nn::Linear(nn::LinearOptions(4, 4).bias(false)));
  }
  Tensor forward(Tensor x) {  // (length, batch, 4)
    x = x + std::get<0>(attention->forward(x, x, x));
    x = std::get<0>(lstm->forward(norm(x)));
    return SavingLinear::apply(x, linear->weight);
  }
  nn::MultiheadAttention attention{nullptr};
  nn::LSTM lstm{nullptr};
  NormLayer norm{nullptr};
  nn::Linear linear{nullptr};
};

}  // namespace

// A weight was empty because its owner's forward was never called (attention's output projection), because a cached handle still saw
// the shard (recurrent layers), or because backward read it anew. The bias of the packed projection is left out for its third for keys,
// which cancels out of the softmax.
RANKS_TEST("E10: modules that go past their children or keep handles", "[cases][quick]", 1, 2, 3) {
  check_parity<BypassImpl>(
      group, [] { return std::make_shared<BypassImpl>(); },
      [](int rank, int step) {
        torch::manual_seed(100 + 10 * step + rank);
        return torch::randn({3, 2, 4});
      },
      [](BypassImpl& m, Tensor x) { return m.forward(x).square().mean(); },
      {.fsdp = {.auto_wrap_policy = kEachModule}, .skip = {"attention.in_proj_bias"}});
}
