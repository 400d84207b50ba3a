// The errors of docs/errors.md that a program can go on from, one by one on a model of its own: each says what its row says, and then the
// model trains with the numbers of plain training.

#include <fsdp/fsdp.h>

#include <limits>
#include <sstream>

#include "support/expect_contains.h"
#include "support/expect_trains.h"
#include "support/models.h"
#include "support/rank_part.h"
#include "support/ranks.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;
namespace optim = torch::optim;

namespace {

using Model = fsdp::FullyShardedDataParallel<MlpImpl>;

Tensor random_input() { return torch::randn({4, 6}); }
Tensor loss_of(Model& model) { return model(random_input()).square().mean(); }

struct Misuse {
  const char* name;
  std::function<void(Model&, MlpImpl&)> mistake;
  std::vector<std::string> says;
  bool over_ranks_only = false;
  std::function<void(Model&, MlpImpl&)> before = {}, after = {};  // what the error text is about, and its remedy where state stays behind
};

void backward(Model& model, MlpImpl&) { loss_of(model).backward(); }

optim::Adam& stepped_optimizer(Model& model) {
  static std::unique_ptr<optim::Adam> optimizer;
  optimizer = std::make_unique<optim::Adam>(model.parameters(), 1e-2);
  loss_of(model).backward();
  optimizer->step();
  return *optimizer;
}

struct OwnState : optim::OptimizerCloneableParamState<OwnState> {};

const std::vector<Misuse> kMisuses{
    {"a penalty, the raw module",
     [](Model&, MlpImpl& net) { net.forward(random_input()); },
     {"cannot put sharded parameter", "'fc1.", "into an autograd graph", "outside the wrapper", "model.call"}},
    {"the raw module without gradients",
     [](Model&, MlpImpl& net) {
       torch::NoGradGuard no_grad;
       net.forward(random_input());
     },
     {"cannot combine sharded parameter 'fc1.", "with a tensor of shape", "model->method(x)"}},
    {"LibTorch's clipping",
     [](Model&, MlpImpl& net) { nn::utils::clip_grad_norm_(net.parameters(), 1.0); },
     {"the gradient of sharded parameter 'fc1.weight'", "sees one rank only", "model.clip_grad_norm_"},
     true,
     backward},
    {"LibTorch's clipping by the largest",
     [](Model&, MlpImpl& net) { nn::utils::clip_grad_norm_(net.parameters(), 1.0, std::numeric_limits<double>::infinity()); },
     {"aten::max of a value computed from sharded parameter 'fc1.weight'", "sees one rank only", "model.clip_grad_norm_"},
     true,
     backward},
    {"equal",
     [](Model&, MlpImpl& net) {
       torch::NoGradGuard no_grad;
       torch::equal(net.fc1->bias, net.fc2->bias);
     },
     {"would answer for one rank only", "'fc1.bias'", "summon_full_params()"},
     true},
    {"LBFGS",
     [](Model& model, MlpImpl&) {
       optim::LBFGS optimizer(model.parameters());
       optimizer.step([&] {
         auto loss = loss_of(model);
         loss.backward();
         return loss;
       });
     },
     {"torch::optim::LBFGS begins so", "whole parameters"},
     true},
    {"LBFGS converted",
     [](Model& model, MlpImpl&) {
       optim::LBFGS optimizer(model.parameters());
       fsdp::shard_optimizer_state(optimizer, model);
     },
     {"LBFGS keeps one state", "Adagrad"}},
    {"state of an odd shape",
     [](Model& model, MlpImpl& net) {
       auto& optimizer = stepped_optimizer(model);
       auto& state = *optimizer.state().at(net.fc2->weight.unsafeGetTensorImpl());
       static_cast<optim::AdamParamState&>(state).exp_avg(torch::zeros({2, 2}));
       fsdp::shard_optimizer_state(optimizer, model);
     },
     {"shard_optimizer_state: exp_avg", "'fc2.weight' has shape [2, 2]", "[8, 8]", "build the optimizer anew"}},
    {"state of an own type",
     [](Model& model, MlpImpl& net) {
       auto& optimizer = stepped_optimizer(model);
       optimizer.state()[net.fc2->weight.unsafeGetTensorImpl()] = std::make_unique<OwnState>();
       fsdp::shard_optimizer_state(optimizer, model);
     },
     {"keeps state of a type of its own", "'fc2.weight'", "after wrapping"}},
    {"set_data to another shape",
     [](Model& model, MlpImpl& net) {
       const auto own = rank_part(net.fc2->weight);
       net.fc2->weight.set_data(torch::zeros({3, 3}));
       try {
         model(random_input());
       } catch (...) {
         net.fc2->weight.set_data(own);
         throw;
       }
     },
     {"'fc2.weight' was given other data while sharded", "[3, 3]", "[8, 8]", "before wrapping"}},
    {"pointer to what is not gathered",
     [](Model& model, MlpImpl&) { model.call([](MlpImpl& m) { m.fc2->weight.data_ptr(); }); },
     {"the parameters of unit 'fc2' are not gathered now", "summon_full_params()"}},
    {"saving what is not gathered",
     [](Model& model, MlpImpl&) {
       model.call([](MlpImpl& m) {
         std::stringstream file;
         torch::save(m.fc2->weight, file);
       });
     },
     {"the parameters of unit 'fc2' are not gathered now", "summon_full_params()"}},
    {"to", [](Model& model, MlpImpl&) { model.to(torch::kDouble); }, {"FullyShardedDataParallel::to", "before wrapping"}},
    {"save",
     [](Model& model, MlpImpl&) {
       torch::serialize::OutputArchive archive;
       model.save(archive);
     },
     {"saving a FullyShardedDataParallel", "fsdp::save_weights", "fsdp::save_checkpoint"}},
    {"load",
     [](Model& model, MlpImpl&) {
       torch::serialize::InputArchive archive;
       model.load(archive);
     },
     {"loading into a FullyShardedDataParallel", "before wrapping"}},
    {"clone", [](Model& model, MlpImpl&) { model.clone(); }, {"cloning a FullyShardedDataParallel", "before wrapping"}},
    {"an unknown unit",
     [](Model& model, MlpImpl&) { auto full = model.summon_full_params({.units = {"fc9"}}); },
     {"there is no unit 'fc9'", "'fc1', 'fc2', 'fc3'"}},
    {"unwrap while running",
     [](Model& model, MlpImpl&) { model.call([&](MlpImpl&) { model.unwrap(); }); },
     {"unwrap() while the model is running"}},
    {"a write in forward",
     [](Model& model, MlpImpl&) {
       torch::NoGradGuard no_grad;
       model.call([](MlpImpl& m) { m.fc2->weight.clamp_(-1, 1); });
     },
     {"aten::clamp_ writes to parameter 'fc2.weight' while it is gathered", "WRITE_THROUGH", "write_back", "buffer"}},
    {"set_data in forward",
     [](Model& model, MlpImpl&) { model.call([](MlpImpl& m) {
                                    m.fc2->weight.set_data(torch::zeros({8, 8}));
                                  }); },
     {"'fc2.weight' would be given other data", "in the middle of forward", "copy_"}},
    {"resize_ in forward",
     [](Model& model, MlpImpl&) {
       torch::NoGradGuard no_grad;
       model.call([](MlpImpl& m) { m.fc2->weight.resize_({4, 4}); });
     },
     {"aten::resize_ would give parameter 'fc2.weight' other memory", "copy_"}},
    {"t_ in forward",
     [](Model& model, MlpImpl&) {
       torch::NoGradGuard no_grad;
       model.call([](MlpImpl& m) { m.fc2->weight.t_(); });
     },
     {"aten::t_ would make parameter 'fc2.weight' itself a view", "without the underscore"}},
    {"create_graph into .grad",
     [](Model& model, MlpImpl&) { loss_of(model).backward({}, true, /*create_graph=*/true); },
     {"backward(create_graph=true) into .grad of sharded parameter", "torch::autograd::grad"}},
    {"a .grad of another shape",
     [](Model& model, MlpImpl& net) {
       net.fc1->weight.mutable_grad() = torch::ones({2, 2});
       loss_of(model).backward();
     },
     {".grad of parameter 'fc1.weight' was assigned a tensor of shape [2, 2]", "zero_grad()"},
     false,
     backward},
    {"backward after a step",
     [](Model& model, MlpImpl&) {
       auto late = loss_of(model);
       stepped_optimizer(model);
       late.backward();
     },
     {"modified by an inplace operation"}},
    {"a negative bound",
     [](Model& model, MlpImpl&) { model.clip_grad_norm_(-1.0); },
     {"max_norm must be at least 0, got -1"},
     false,
     backward},
    {"a bound that is no number",
     [](Model& model, MlpImpl&) { model.clip_grad_norm_(std::nan("")); },
     {"max_norm must be at least 0, got nan"},
     false,
     backward},
    {"a norm that is none",
     [](Model& model, MlpImpl&) { model.clip_grad_norm_(1.0, 0.0); },
     {"norm_type must be above 0", "got 0"},
     false,
     backward},
    {"a negative bound of values",
     [](Model& model, MlpImpl&) { model.clip_grad_value_(-0.5); },
     {"clip_value must be at least 0, got -0.5"},
     false,
     backward},
    {"writing slices into a larger tensor",
     [](Model&, MlpImpl& net) {
       torch::NoGradGuard no_grad;
       const auto n = net.fc1->weight.numel();
       torch::zeros({2 * n + 1}).narrow(0, 0, n).copy_(net.fc1->weight);
     },
     {"cannot write sharded parameter 'fc1.weight'", "into a part of a larger tensor", "zeros_like"},
     true},
};

}  // namespace

RANKS_TEST("every error outside of wrapping leaves a model that trains with right numbers", "[wrappers][errors][quick]", 1, 2, 3) {
  for (const auto& misuse : kMisuses) {
    if (misuse.over_ranks_only && group.world_size() == 1) continue;
    try {
      torch::manual_seed(5);
      Mlp net;
      Model model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
      if (misuse.before) misuse.before(model, *net);
      expect_contains(error_of([&] { misuse.mistake(model, *net); }), misuse.says);
      expect_trains(model, group, std::make_shared<MlpImpl>(), random_input);
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(misuse.name) + ": " + error.what());
    }
  }
}

RANKS_TEST("a sparse gradient is refused, and the same model trains without", "[wrappers][errors][quick]", 1, 2, 3) {
  struct SparseNet : nn::Module {
    SparseNet() { embedding = register_module("embedding", nn::Embedding(nn::EmbeddingOptions(5, 3).sparse(true))); }
    Tensor forward(Tensor ids) { return embedding(ids); }
    nn::Embedding embedding{nullptr};
  };
  auto net = std::make_shared<SparseNet>(), plain = std::make_shared<SparseNet>();
  fsdp::FullyShardedDataParallel model(net, group);
  expect_contains(error_of([&] {
                    model(torch::tensor({1, 2})).sum().backward();
                  }),
                  {"'embedding.weight' got a gradient of layout Sparse", "sparse(false)"});
  net->embedding->options.sparse(false);
  plain->embedding->options.sparse(false);
  expect_trains(model, group, plain, [] { return torch::randint(0, 5, {4}); });
}

// A module that builds itself in its first forward, after wrapping: its parameters trained on each rank for itself.
RANKS_TEST("parameters registered after wrapping are refused by name", "[wrappers][errors][quick]", 1, 2, 3) {
  struct Lazy : nn::Module {
    Lazy() { first = register_module("first", nn::Linear(6, 3)); }
    Tensor forward(Tensor x) {
      if (!inner) inner = register_module("inner", nn::Sequential(nn::Linear(3, 3)));
      return inner->forward(first(x));
    }
    nn::Linear first{nullptr};
    nn::Sequential inner{nullptr};
  };
  const auto rank = "rank " + std::to_string(group.rank());
  auto net = std::make_shared<Lazy>(), plain = std::make_shared<Lazy>();
  plain->forward(random_input());
  {
    fsdp::FullyShardedDataParallel model(net, group);
    model(random_input());
    const std::vector<std::function<void()>> ways{[&] { model(random_input()); }, [&] { model->forward(random_input()); },
                                                  [&] { model.call([](Lazy&) {}); }, [&] { auto full = model.summon_full_params(); }};
    for (const auto& way : ways)
      expect_contains(error_of(way),
                      {rank, "'inner.0.weight' was registered after its module was wrapped", "run one forward before wrapping"});
    for (auto& p : net->inner->parameters()) p.set_requires_grad(false);
    model(random_input());  // nothing to train
    for (auto& p : net->inner->parameters()) p.set_requires_grad(true);
    expect_contains(error_of([&] { model(random_input()); }), {"'inner.0.weight'"});
    model.unwrap();
  }
  fsdp::FullyShardedDataParallel model(net, group);
  expect_trains(model, group, plain, random_input);
}

RANKS_TEST("a parameter replaced in the dictionary is refused by name", "[wrappers][errors][quick]", 1, 2, 3) {
  struct Net : nn::Module {
    Net() { weight = register_parameter("weight", torch::randn({6, 3})); }
    Tensor forward(Tensor x) { return x.mm(weight); }
    Tensor replace(Tensor by) {
      auto before = weight;
      parameters_["weight"] = weight = std::move(by);
      return before;
    }
    Tensor weight;
  };
  auto net = std::make_shared<Net>();
  fsdp::FullyShardedDataParallel model(net, group);
  const auto before = net->replace(torch::randn({6, 3}).requires_grad_());
  expect_contains(error_of([&] { model(random_input()); }),
                  {"rank " + std::to_string(group.rank()), "'weight' was replaced by another tensor", "write_back"});
  net->replace(torch::zeros_like(before.detach()).requires_grad_());  // a slice by its keys, but none that trains here
  expect_contains(error_of([&] { model(random_input()); }), {"'weight' was replaced by another tensor"});
  net->replace(before);
  expect_trains(model, group, std::make_shared<Net>(), random_input);
}
