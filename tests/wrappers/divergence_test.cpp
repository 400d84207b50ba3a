// One rank does something else than the others: every rank must get an error that says what each is about to do, soon, and none may
// hang, abort, or go on with wrong numbers.
//
// Each kind is tried twice: while the order is new (ranks compare every operation) and once it is known (who leaves it asks first).

#include <fsdp/fsdp.h>

#include <chrono>
#include <functional>

#include "support/parity.h"
#include "support/ranks.h"

using namespace fsdp::testing;
using namespace std::chrono_literals;
namespace nn = torch::nn;

namespace {

constexpr int kOddRank = 1;

struct FourUnitsImpl : nn::Module {
  FourUnitsImpl() {
    for (size_t i = 0; i < 4; ++i) units.push_back(register_module("u" + std::to_string(i), nn::Linear(8, 8)));
    scale = register_parameter("scale", torch::ones({8}));
  }
  // The units in this order. throw_after: an exception once so many have run.
  torch::Tensor forward(torch::Tensor x, const std::vector<int>& order = {0, 1, 2, 3}, int throw_after = -1) {
    x = x * scale;
    int run = 0;
    for (const int i : order) {
      if (run++ == throw_after) throw std::runtime_error("of the model");
      x = torch::tanh(units[i](x));
    }
    return x;
  }
  std::vector<nn::Linear> units;
  torch::Tensor scale;
};
TORCH_MODULE(FourUnits);

struct Training {
  explicit Training(const fsdp::ProcessGroup& group_)
      : group(group_),
        model(net, group, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()}),
        optimizer(model.parameters(), 1e-2) {}

  torch::Tensor loss(const std::vector<int>& order = {0, 1, 2, 3}) { return model(torch::ones({2, 8}), order).square().sum(); }
  void finish() {
    model.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  void step() {
    loss().backward();
    finish();
  }

  fsdp::ProcessGroup group;
  FourUnits net;
  fsdp::FullyShardedDataParallel<FourUnitsImpl> model;
  torch::optim::SGD optimizer;
};

struct Kind {
  const char* name;
  std::function<void(Training&)> odd;      // instead of a step, on the odd rank
  std::vector<std::string> expected = {};  // in the error of every rank, beside what is always there
};

// Fails on purpose, in backward, when its gradient arrives.
torch::Tensor failing_backward(const torch::Tensor& x) {
  auto y = x * 1;
  y.register_hook([](const torch::Tensor&) -> torch::Tensor { throw std::runtime_error("of a hook"); });
  return y;
}

template <class F>
void caught(F f) {
  try {
    f();
  } catch (const std::runtime_error&) {
  }
}

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> kinds{
      {"skips a unit",
       [](Training& t) {
         t.loss({0, 2, 3}).backward(), t.finish();
       },
       {"unit 'u"}},
      {"swaps two units",
       [](Training& t) {
         t.loss({0, 2, 1, 3}).backward(), t.finish();
       },
       {"unit 'u"}},
      {"runs the units backwards",
       [](Training& t) {
         t.loss({3, 2, 1, 0}).backward(), t.finish();
       },
       {"unit 'u"}},
      {"runs three units again",
       [](Training& t) {
         t.loss({0, 1, 2, 3, 0, 1, 2}).backward(), t.finish();
       },
       {"unit 'u"}},
      {"makes no backward", [](Training& t) { t.loss(); }},
      {"makes a second forward", [](Training& t) { (t.loss() + t.loss()).backward(), t.finish(); }},
      {"makes two backwards",
       [](Training& t) {
         auto loss = t.loss();
         loss.backward({}, true);
         loss.backward();
         t.finish();
       }},
      {"evaluates alone",
       [](Training& t) {
         const torch::NoGradGuard no_grad;
         t.loss();
       },
       {"forward without gradients"}},
      {"stops its graph before the first units",
       [](Training& t) {
         t.model.call([](FourUnitsImpl& net) { return net.units[3](net.units[2](torch::ones({2, 8}))).sum(); }).backward();
         t.finish();
       }},
      {"throws in forward and goes on",
       [](Training& t) { caught([&] {
                           t.model(torch::ones({2, 8}), std::vector<int>{0, 1, 2, 3}, 3);
                         }); }},
      {"throws in backward and goes on", [](Training& t) { caught([&] { failing_backward(t.loss()).backward(); }); }},
      {"throws between backward and step and goes on", [](Training& t) { t.loss().backward(); }, {"clip_grad_norm_"}},
      {"clips twice",
       [](Training& t) {
         t.loss().backward();
         t.model.clip_grad_norm_(2.0);
         t.finish();
       },
       {"clip_grad_norm_"}},
      {"has one batch fewer and waits at a barrier", [](Training& t) { t.group.barrier(); }, {"barrier"}},
      {"looks at whole parameters alone", [](Training& t) { const auto whole = t.model.summon_full_params(); }, {"summon_full_params"}},
      {"unwraps alone", [](Training& t) { t.model.unwrap(); }, {"unwrap"}},
      {"wraps another model alone", [](Training& t) { fsdp::FullyShardedDataParallel other(FourUnits(), t.group); }, {"plan of a model"}},
      {"shards optimizer state alone", [](Training& t) { fsdp::shard_optimizer_state(t.optimizer, t.model); }, {"optimizer state"}},
      {"froze a unit alone",
       [](Training& t) {
         for (auto& p : t.net->units[2]->parameters()) p.set_requires_grad(false);
         t.step();
       },
       {"unit 'u2'"}},
      {"sends no gradient to a unit",
       [](Training& t) {
         t.model
             .call([](FourUnitsImpl& net) {
               const torch::NoGradGuard no_grad;
               auto x = net.units[1](net.units[0](torch::ones({2, 8}) * net.scale));
               const torch::AutoGradMode grad(true);
               return net.units[3](net.units[2](x)).square().sum();
             })
             .backward();
         t.finish();
       }},
      {"closes its group", [](Training& t) { t.group.close(); }, {"rank 1 has closed its group, or ended, after "}},
  };
  return kinds;
}

void expect_error_everywhere(fsdp::ProcessGroup& pool, const Kind& kind, int steps_before) {
  const std::string what = std::string(kind.name) + ", after " + std::to_string(steps_before) + " steps";
  auto group = fsdp::init_process_group({.timeout = 20s, .rendezvous_timeout = 20s});
  const bool odd = group.rank() == kOddRank;
  Training training(group);
  for (int step = 0; step < steps_before; ++step) training.step();
  pool.barrier();
  const auto started = std::chrono::steady_clock::now();
  const std::string error = error_of([&] {
    odd ? kind.odd(training) : training.step();
    for (int step = 0; step < 3; ++step) training.step();
  });
  const auto passed = std::chrono::steady_clock::now() - started;
  EXPECT(!error.empty(), what << ": no error");
  EXPECT(passed < 2s, what << ": the error took " << std::chrono::duration<double>(passed).count() << " s: " << error);
  if (odd && std::string(kind.name) == "closes its group") {
    EXPECT(error.find("the group has been closed") != std::string::npos, error);
  } else {
    auto expected = kind.expected;
    if (std::string(kind.name) != "closes its group")
      expected.insert(expected.end(), {"the ranks do different things", "Operation #", "rank 1: ", "rank"});
    for (const auto& text : expected) EXPECT(error.find(text) != std::string::npos, what << ": '" << text << "' in: " << error);
  }
  pool.barrier();
}

}  // namespace

RANKS_TEST("a rank that leaves the order while it is new: named on all ranks", "[wrappers][divergence][B6]", 2, 3) {
  for (const auto& kind : kinds()) expect_error_everywhere(group, kind, 0);
}

RANKS_TEST("a rank that leaves the known order: named on all ranks", "[wrappers][divergence][B6]", 2, 3, 4) {
  for (const auto& kind : kinds()) expect_error_everywhere(group, kind, 4);
}

RANKS_TEST("all ranks may change the order together", "[wrappers][divergence][quick]", 2, 3) {
  for (const auto check : {fsdp::CheckOrder::ORDER_ON_CHANGE, fsdp::CheckOrder::ORDER_ALWAYS}) {
    auto own = fsdp::init_process_group();
    FourUnits net;
    fsdp::FullyShardedDataParallel model(net, own, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(), .check_order = check});
    for (int step = 0; step < 12; ++step) {
      const std::vector<int> order = step % 3 == 0   ? std::vector<int>{0, 1, 2, 3}
                                     : step % 3 == 1 ? std::vector<int>{3, 1}
                                                     : std::vector<int>{2, 2, 0};
      model(torch::ones({2, 8}), order).sum().backward();
      if (step % 4 == 3) {
        const torch::NoGradGuard no_grad;
        model(torch::ones({2, 8}));
        own.barrier();
      }
    }
  }
}

RANKS_TEST("a wait that times out tells the last operations of all ranks that wait", "[wrappers][divergence]", 2, 3) {
  auto own = fsdp::init_process_group({.timeout = 1s, .rendezvous_timeout = 20s});
  Training training(own);
  for (int step = 0; step < 3; ++step) training.step();
  group.barrier();
  if (own.rank() == 0) {  // does something else altogether
    std::this_thread::sleep_for(2500ms);
    return;
  }
  const std::string error = error_of([&] { training.step(); });
  for (const std::string text : {"timed out", "last operations of rank 1", "last operations of rank 0: it does not answer", "all_gather"})
    EXPECT(error.find(text) != std::string::npos, "'" << text << "' in: " << error);
}
