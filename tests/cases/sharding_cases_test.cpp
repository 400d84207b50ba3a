// What sharding itself has broken elsewhere: padding, sizes, dtypes, strides, who owns a tensor, where values come from. Each case
// tells what happened to users of other libraries and shows that it does not happen here.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"
#include "support/same_use.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;
namespace F = torch::nn::functional;

namespace {

const auto kEachModule = fsdp::size_based_auto_wrap_policy(1);

const MakeOptimizer kSgd = [](std::vector<Tensor> p) { return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.1)); };
const MakeOptimizer kAdam = [](std::vector<Tensor> p) { return std::make_unique<torch::optim::Adam>(p, torch::optim::AdamOptions(0.1)); };

Tensor random_input(std::vector<int64_t> shape, int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  return torch::randn(shape);
}

struct TiedImpl : nn::Module {
  TiedImpl() {
    embedding = register_module("embedding", nn::Embedding(5, 4));
    head = register_module("head", TiedHead(4, embedding->weight));
  }
  Tensor forward(Tensor ids) { return head(embedding(ids)); }
  nn::Embedding embedding{nullptr};
  TiedHead head{nullptr};
};

}  // namespace

// A matrix shared by embedding and head, of more rows than the ranks divide, sat in two sharding groups. Each padded its own copy, and the
// rank with the padding gathered one that its optimizer never updated: its rows kept their first values all run long.
RANKS_TEST("A1: tied weight with uneven rows", "[cases][quick]", 1, 2, 3, 4) {
  const auto only = [](const char* name) {
    return fsdp::lambda_auto_wrap_policy([name](const nn::Module& m) { return m.name().find(name) != std::string::npos; });
  };
  for (const auto& policy : {fsdp::WrapPolicy{}, only("Embedding"), only("TiedHead"), kEachModule}) {
    check_parity<TiedImpl>(
        group, [] { return std::make_shared<TiedImpl>(); }, [](int rank, int step) { return torch::arange(5).roll(rank + step); },
        [](TiedImpl& m, Tensor ids) { return F::cross_entropy(m.forward(ids), ids.roll(1)); },
        {.fsdp = {.auto_wrap_policy = policy}, .steps = 3, .make_optimizer = kSgd});

    auto net = std::make_shared<TiedImpl>();
    fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = policy});
    const auto rows = [&] {
      auto full = model.summon_full_params();
      return net->embedding->weight.detach().clone();
    };
    const auto before = rows();
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    F::cross_entropy(model(torch::arange(5)), torch::arange(5)).backward();
    optimizer.step();
    EXPECT((rows() - before).abs().amax(1).gt(0).all().item<bool>(), "a row did not move");
  }
}

// On one rank, a one-element parameter in a unit of its own never trained: the average over a group of one left the end of the buffer
// untouched.
RANKS_TEST("A2: a tiny parameter in a group of one", "[cases][quick]", 1, 2) {
  struct ScaleImpl : nn::Module {
    ScaleImpl() { scale = register_parameter("scale", torch::ones({1})); }
    Tensor forward(Tensor x) { return scale * x.sum(); }
    Tensor scale;
  };
  struct Net : nn::Module {
    Net() { inner = register_module("inner", std::make_shared<ScaleImpl>()); }
    Tensor forward(Tensor x) { return inner->forward(x).sum(); }
    std::shared_ptr<ScaleImpl> inner;
  };
  check_parity<Net>(
      group, [] { return std::make_shared<Net>(); }, [](int rank, int step) { return random_input({3}, rank, step); },
      [](Net& m, Tensor x) { return m.forward(x); }, {.fsdp = {.auto_wrap_policy = kEachModule}, .steps = 1, .make_optimizer = kSgd});
  auto recorded = record(group);
  fsdp::FullyShardedDataParallel model(std::make_shared<Net>(), recorded.group, {.auto_wrap_policy = kEachModule});
  model(torch::ones({3})).backward();
  EXPECT(group.world_size() > 1 || recorded.log->records().empty(), recorded.log->text());
}

// A block called twice in one forward trained with about half its gradient: the second reduction was stored over the first.
RANKS_TEST("A4: a module used twice in one forward", "[cases][quick]", 1, 2, 3, 4) {
  struct Net : nn::Module {
    Net() {
      u = register_module("u", nn::Linear(nn::LinearOptions(4, 4).bias(false)));
      before = register_module("before", nn::Linear(nn::LinearOptions(4, 4).bias(false)));
    }
    Tensor in_a_row(Tensor x) { return u(torch::tanh(u(before(x)))); }
    Tensor side_by_side(Tensor x) { return u(before(x)) + u(x * 2); }
    nn::Linear u{nullptr}, before{nullptr};
  };
  for (const auto method : {&Net::in_a_row, &Net::side_by_side}) {
    check_parity<Net>(
        group, [] { return std::make_shared<Net>(); },
        [](int rank, int step) {
          return random_input({3, 4}, rank, step);
        },
        [method](Net& m, Tensor x) { return (m.*method)(x).square().mean(); }, {.fsdp = {.auto_wrap_policy = kEachModule}, .steps = 3});
    if (group.world_size() == 1) continue;
    auto recorded = record(group);
    fsdp::FullyShardedDataParallel model(std::make_shared<Net>(), recorded.group, {.auto_wrap_policy = kEachModule});
    recorded.log->clear();
    model.call([&](Net& m) { return (m.*method)(torch::ones({3, 4})).square().mean(); }).backward();
    EXPECT(recorded.log->count("reduce_scatter") == 2, "each unit is reduced once:\n" << recorded.log->text());
  }
}

// Ranks whose part of a group was empty died at start; tensors of zero elements lost their shape, or died in backward when they came
// last.
RANKS_TEST("A5: fewer elements than ranks, and none at all", "[cases][quick]", 1, 2, 3, 4) {
  struct Net : nn::Module {
    explicit Net(bool empty_last) {
      one = register_parameter("one", torch::randn({1}));
      if (!empty_last) empty = register_parameter("empty", torch::randn({0, 8}));
      two = register_parameter("two", torch::randn({2}));
      three = register_parameter("three", torch::randn({3}));
      bias = register_parameter("bias", torch::randn({5}));
      if (empty_last) empty = register_parameter("empty", torch::randn({0, 8}));
    }
    Tensor forward(Tensor x) {
      EXPECT(empty.sizes() == torch::IntArrayRef({0, 8}), empty.sizes());
      return ((x + bias) * one).sum() + (two.sum() * three).square().sum() + empty.mm(torch::ones({8, 3})).sum();
    }
    Tensor one, empty, two, three, bias;
  };
  for (const bool empty_last : {false, true})
    for (const auto& make_optimizer : {kSgd, kAdam})
      check_parity<Net>(
          group, [&] { return std::make_shared<Net>(empty_last); }, [](int rank, int step) { return random_input({5}, rank, step); },
          [](Net& m, Tensor x) { return m.forward(x); }, {.steps = 3, .learning_rate = 1e-2, .make_optimizer = make_optimizer});
}

// A transposed weight was refused, and one flattened by view would have been permuted; channels-last was lost and convolutions
// became slow.
RANKS_TEST("A7: transposed and channels-last weights keep values and strides", "[cases][quick]", 1, 2, 3) {
  struct Net : nn::Module {
    Net() {
      transposed = register_parameter("transposed", torch::rand({3, 4}).t());
      conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(3, 3, 3).bias(false)));
      conv->weight.set_data(conv->weight.contiguous(torch::MemoryFormat::ChannelsLast));
    }
    Tensor forward(Tensor x) {
      EXPECT(transposed.strides() == torch::IntArrayRef({1, 4}), transposed.strides());
      EXPECT(conv->weight.is_contiguous(torch::MemoryFormat::ChannelsLast), conv->weight.strides());
      return conv(x).mean({2, 3}).mm(transposed.t());
    }
    Tensor transposed;
    nn::Conv2d conv{nullptr};
  };
  torch::manual_seed(1);
  auto net = std::make_shared<Net>(), plain = std::make_shared<Net>();
  copy_values(*net, *plain);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  const auto x = torch::randn({2, 3, 5, 5}).contiguous(torch::MemoryFormat::ChannelsLast);
  EXPECT(torch::equal(model(x), plain->forward(x)), "forward before any step");
  check_parity<Net>(
      group, [] { return std::make_shared<Net>(); },
      [](int rank, int step) {
        return random_input({2, 3, 5, 5}, rank, step);
      },
      [](Net& m, Tensor x) { return m.forward(x).square().mean(); }, {.fsdp = {.auto_wrap_policy = kEachModule}});
}

// Frozen bytes of a quantised base could not be flattened together with floats.
RANKS_TEST("A8: integer parameters in a unit", "[cases][quick]", 1, 2, 3) {
  struct Net : nn::Module {
    Net() {
      codes = register_parameter("codes", torch::tensor({0, 1, 127, 128, 200, 254, 255}, torch::kByte), /*requires_grad=*/false);
      linear = register_module("linear", nn::Linear(nn::LinearOptions(4, 4).bias(false)));
    }
    Tensor forward(Tensor x) { return linear(x) * codes.to(torch::kFloat).mean(); }
    Tensor codes;
    nn::Linear linear{nullptr};
  };
  check_parity<Net>(
      group, [] { return std::make_shared<Net>(); },
      [](int rank, int step) {
        return random_input({3, 4}, rank, step);
      },
      [](Net& m, Tensor x) {
        EXPECT(torch::equal(m.codes, torch::tensor({0, 1, 127, 128, 200, 254, 255}, torch::kByte)), m.codes);
        return m.forward(x).square().mean() * 1e-4;
      },
      {.steps = 3});
}

// Ranks seeded differently trained different models: nothing had made their first values equal.
RANKS_TEST("A11: every rank starts from rank 0's parameters and buffers", "[cases][quick]", 1, 2, 4) {
  struct Net : nn::Module {
    Net() {
      norm = register_module("norm", nn::BatchNorm1d(6));
      mlp = register_module("mlp", Mlp());
      noise = register_buffer("noise", torch::randn({3}));
    }
    nn::BatchNorm1d norm{nullptr};
    Mlp mlp{nullptr};
    Tensor noise;
  };
  torch::manual_seed(0);
  Net rank_0s;
  torch::manual_seed(group.rank());
  auto net = std::make_shared<Net>();
  net->norm->running_mean.fill_(group.rank());
  net->norm->num_batches_tracked.fill_(group.rank());
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  auto full = model.summon_full_params();
  const auto want = rank_0s.named_parameters(), buffers = rank_0s.named_buffers();
  for (const auto& item : model.named_parameters()) EXPECT(torch::equal(item.value(), want[item.key()]), item.key());
  for (const auto& item : model.named_buffers()) EXPECT(torch::equal(item.value(), buffers[item.key()]), item.key());
}

// What stood in for a resting weight had one element and broadcast happily: a sibling's weight in an element-wise operator gave a wrong
// result and no error.
RANKS_TEST("A14: a sibling's weight inside the wrapper is whole, outside it is refused", "[cases][quick]", 1, 2, 3) {
  struct Net : nn::Module {
    Net() {
      a = register_module("a", nn::Linear(4, 4));
      b = register_module("b", nn::Linear(4, 4));
    }
    Tensor forward(Tensor x) { return b(a(x)) + b->weight.sum(0) * a->weight; }
    nn::Linear a{nullptr}, b{nullptr};
  };
  check_parity<Net>(
      group, [] { return std::make_shared<Net>(); },
      [](int rank, int step) {
        return random_input({4, 4}, rank, step);
      },
      [](Net& m, Tensor x) { return m.forward(x).square().mean(); }, {.fsdp = {.auto_wrap_policy = kEachModule}});
  auto net = std::make_shared<Net>();
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = kEachModule});
  torch::NoGradGuard no_grad;
  const auto text = error_of([&] { (torch::ones({4, 4}) * net->b->weight).sum(); });
  EXPECT(text.find("'b.weight'") != std::string::npos && text.find("model(x)") != std::string::npos, text);
}
