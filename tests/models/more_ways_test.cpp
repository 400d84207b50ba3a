// Further habits of LibTorch programs: target networks by clone(), straight-through codebooks, weights made from weights, a decoder that
// is its encoder transposed, the training step as a closure, an adapted learning rate, a tree of recursive calls.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/same_use.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;
namespace F = torch::nn::functional;

namespace {

const auto kEachModule = fsdp::size_based_auto_wrap_policy(1);

Tensor random_input(std::vector<int64_t> shape, int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  return torch::randn(shape);
}

// clone() needs what the constructor builds to be built in reset().
struct QNetImpl : nn::Cloneable<QNetImpl> {
  QNetImpl() { reset(); }
  void reset() override {
    body = register_module("body", nn::Linear(4, 8));
    head = register_module("head", nn::Linear(8, 3));
  }
  Tensor forward(Tensor x) { return head(torch::relu(body(x))); }
  nn::Linear body{nullptr}, head{nullptr};
};

struct CodebookImpl : nn::Module {
  CodebookImpl() {
    encoder = register_module("encoder", nn::Linear(6, 4));
    codes = register_parameter("codes", torch::randn({5, 4}));
    usage = register_buffer("usage", torch::zeros({5}));
  }
  std::vector<Tensor> forward(Tensor x) {
    const auto z = encoder(x);
    const auto index = torch::cdist(z, codes).argmin(1);
    const auto chosen = codes.index({index});
    usage.index_add_(0, index, torch::ones({index.size(0)}));
    const auto through = z + (chosen - z).detach();
    return {F::linear(through, encoder->weight.t()), F::mse_loss(chosen, z.detach()), F::mse_loss(z, chosen.detach()), codes};
  }
  nn::Linear encoder{nullptr};
  Tensor codes, usage;
};

struct HyperImpl : nn::Module {
  HyperImpl() {
    generator = register_module("generator", nn::Linear(3, 2 * 2 * 9));
    basis = register_parameter("basis", torch::randn({4, 3}));
    out = register_parameter("out", torch::zeros({3, 2}));
  }
  Tensor forward(Tensor x) {  // (n, 2, 5, 5)
    auto y = x;
    for (int64_t i = 0; i < basis.size(0); ++i) {
      auto kernel = generator(basis[i]).view({2, 2, 3, 3});
      kernel = (kernel - kernel.mean()) / (kernel.std() + 1e-3);
      y = torch::tanh(torch::conv2d(y, kernel, {}, 1, 1));
    }
    auto result = torch::empty({x.size(0), 3});
    result.copy_(y.mean({2, 3}).matmul(out.t()) + out.norm());
    result.select(1, 0).add_(basis.select(0, 1)[2]);
    return result;
  }
  nn::Linear generator{nullptr};
  Tensor basis, out;
};

struct TreeImpl : nn::Module {
  TreeImpl() {
    leaf = register_module("leaf", nn::Linear(2, 4));
    join = register_module("join", nn::Sequential(nn::Linear(8, 4), nn::LayerNorm(nn::LayerNormOptions({4}))));
  }
  Tensor forward(const Tensor& x, int64_t from, int64_t to) {
    if (to - from == 1) return leaf(x[from]);
    const auto middle = from + (to - from + 1) / 2;
    return torch::tanh(join->forward(torch::cat({forward(x, from, middle), forward(x, middle, to)})));
  }
  nn::Linear leaf{nullptr};
  nn::Sequential join{nullptr};
};

}  // namespace

RANKS_TEST("models: Q-learning with a target network made by clone()", "[models][quick]", 1, 2, 3) {
  check_same_use<QNetImpl>(
      group, [] { return std::make_shared<QNetImpl>(); },
      [](Use<QNetImpl>& net) -> std::vector<Tensor> {
        std::shared_ptr<QNetImpl> target;
        net.call([&](QNetImpl& m) {
          torch::NoGradGuard no_grad;
          target = std::dynamic_pointer_cast<QNetImpl>(m.clone());
          return Tensor();
        });
        EXPECT(target->body->weight.sizes() == torch::IntArrayRef({8, 4}), target->body->weight.sizes());
        torch::optim::Adam optimizer(net.parameters, 1e-2);
        std::vector<Tensor> losses;
        for (int step = 0; step < 3; ++step) {
          const auto x = torch::randn({5, 4});
          const auto aim = 1 + 0.9 * std::get<0>(target->forward(x + 0.1).max(1)).detach();
          const auto q = net(x).gather(1, torch::randint(0, 3, {5, 1})).squeeze(1);
          losses.push_back(F::smooth_l1_loss(q, aim));
          losses.back().backward();
          nn::utils::clip_grad_value_(net.parameters, 0.05);
          optimizer.step();
          optimizer.zero_grad();
          net.call([&](QNetImpl& m) {
            torch::NoGradGuard no_grad;
            const auto from = m.named_parameters();
            for (auto& item : target->named_parameters()) item.value().mul_(0.9).add_(from[item.key()], 0.1);
            return Tensor();
          });
        }
        for (auto& p : target->parameters()) losses.push_back(p);
        return losses;
      });
}

RANKS_TEST("models: a codebook with a straight-through gradient, returned by forward", "[models][quick]", 1, 2, 3) {
  check_parity<CodebookImpl>(
      group, [] { return std::make_shared<CodebookImpl>(); },
      [](int rank, int step) {
        return random_input({7, 6}, rank, step);
      },
      [](CodebookImpl& m, Tensor x) {
        const auto parts = m.forward(x);
        return F::mse_loss(parts[0], x) + parts[1] + 0.25 * parts[2] + 1e-3 * parts[3].square().sum();
      },
      {.fsdp = {.auto_wrap_policy = kEachModule}});
}

RANKS_TEST("models: convolution kernels made by a network", "[models][quick]", 1, 2, 3) {
  check_parity<HyperImpl>(
      group, [] { return std::make_shared<HyperImpl>(); },
      [](int rank, int step) {
        return random_input({3, 2, 5, 5}, rank, step);
      },
      [](HyperImpl& m, Tensor x) { return (m.forward(x) - 1).square().mean(); },
      // out begins at zero, where a norm has no gradient to speak of; SGD keeps what follows in proportion.
      {.fsdp = {.auto_wrap_policy = kEachModule}, .make_optimizer = [](std::vector<Tensor> p) {
         return std::make_unique<torch::optim::SGD>(p, torch::optim::SGDOptions(0.05).momentum(0.9));
       }});
}

RANKS_TEST("models: a recursive network over a tree", "[models][quick]", 1, 2, 3) {
  check_parity<TreeImpl>(
      group, [] { return std::make_shared<TreeImpl>(); },
      [](int rank, int step) {
        return random_input({3 + step % 2, 2}, rank, step);
      },
      [](TreeImpl& m, Tensor x) { return m.forward(x, 0, x.size(0)).square().sum(); }, {.fsdp = {.auto_wrap_policy = kEachModule}});
}

RANKS_TEST("models: the step as a closure, a schedule, and a group added later", "[models][quick]", 1, 2, 3) {
  check_same_use<MlpImpl>(
      group, [] { return std::make_shared<MlpImpl>(); },
      [](Use<MlpImpl>& net) -> std::vector<Tensor> {
        const std::vector<Tensor> first(net.parameters.begin(), net.parameters.begin() + 4);
        torch::optim::Adam optimizer(first, 1e-2);
        torch::optim::StepLR schedule(optimizer, 2, 0.5);
        std::vector<Tensor> losses;
        for (int step = 0; step < 5; ++step) {
          if (step == 2) optimizer.add_param_group(torch::optim::OptimizerParamGroup({net.parameters.begin() + 4, net.parameters.end()}));
          const auto x = torch::randn({4, 6});
          losses.push_back(optimizer.step([&] {
            optimizer.zero_grad();
            auto loss = net(x).square().mean();
            loss.backward();
            return loss;
          }));
          schedule.step();
        }
        return losses;
      });
}
