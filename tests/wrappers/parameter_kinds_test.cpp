// Parameters of every kind.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/ranks.h"
#include "support/same_use.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace nn = torch::nn;

namespace {

struct KindsImpl : nn::Module {
  KindsImpl() {
    scalar = register_parameter("scalar", torch::randn({}));
    one = register_parameter("one", torch::randn({1}));
    empty = register_parameter("empty", torch::randn({0, 8}));
    three = register_parameter("three", torch::randn({3}));
    transposed = register_parameter("transposed", torch::randn({4, 3}).t());  // (3, 4), strides (1, 3)
    channels_last = register_parameter("channels_last", torch::randn({4, 3, 3, 3}).contiguous(torch::MemoryFormat::ChannelsLast));
    gaps = register_parameter("gaps", torch::randn({3, 8}).narrow(1, 2, 4));  // rows lie 8 apart
    complex = register_parameter("complex", torch::randn({3}, torch::kComplexFloat));
    codes = register_parameter("codes", torch::arange(7).to(torch::kByte), /*requires_grad=*/false);
    wide = register_parameter("wide", torch::randn({5}, torch::kDouble));
    frozen = register_parameter("frozen", torch::randn({4}), /*requires_grad=*/false);
    list = register_module("list", nn::ParameterList());
    list->append(torch::randn({2, 2}).requires_grad_());
    list->append(torch::randn({5}).requires_grad_());
    dict = register_module("dict", nn::ParameterDict());
    dict->insert("gain", torch::randn({2}).requires_grad_());
  }
  Tensor forward(Tensor x) {                               // (2, 3, 8, 8)
    x = torch::conv2d(x, channels_last).mean({2, 3});      // (2, 4)
    x = x.mm(transposed.t()) + three + empty.sum() * one;  // (2, 3)
    x = x.mm(gaps) * frozen * scalar;                      // (2, 4)
    auto phase = torch::view_as_real(complex * complex).sum();
    auto extra = (list[0] * dict["gain"]).sum() + list[1].sum() + codes.to(torch::kFloat).mean() + wide.to(torch::kFloat).square().sum();
    return x * phase + extra;
  }
  Tensor scalar, one, empty, three, transposed, channels_last, gaps, complex, codes, wide, frozen;
  nn::ParameterList list{nullptr};
  nn::ParameterDict dict{nullptr};
};

}  // namespace

RANKS_TEST("parameters of every kind: shapes, strides, values and gradients", "[wrappers][kinds][quick]", 1, 2, 3, 4) {
  check_same_use<KindsImpl>(
      group, [] { return std::make_shared<KindsImpl>(); },
      [](Use<KindsImpl>& net) -> std::vector<Tensor> {
        torch::optim::SGD optimizer(net.parameters, 0.01);
        std::vector<Tensor> losses;
        for (int step = 0; step < 3; ++step) {
          auto loss = net(torch::randn({2, 3, 8, 8})).square().mean();
          loss.backward();
          losses.push_back(loss);
          if (step < 2) {
            optimizer.step();
            optimizer.zero_grad();
          }
        }
        net.call([](KindsImpl& m) {
          EXPECT(m.scalar.dim() == 0, "0-dim");
          EXPECT(m.empty.sizes() == torch::IntArrayRef({0, 8}), m.empty.sizes());
          EXPECT(m.transposed.strides() == torch::IntArrayRef({1, 3}), m.transposed.strides());
          EXPECT(m.channels_last.is_contiguous(torch::MemoryFormat::ChannelsLast), m.channels_last.strides());
          return m.codes.to(torch::kFloat);
        });
        losses.push_back(net.call([](KindsImpl& m) { return m.codes.clone(); }));
        return losses;
      });
}

// The sweep over PyTorch's operators found gradients of a one-column matrix off by 1e-8. The stride of a dimension of size 1 is free, so
// these are contiguous in more than one way; matrix products and convolutions choose their kernel by which one it is.
RANKS_TEST("strides of dimensions of size 1 are kept", "[wrappers][kinds][quick]", 1, 2, 3) {
  struct OnesImpl : nn::Module {
    OnesImpl() {
      column = register_parameter("column", torch::randn({1, 5}).t());  // (5, 1), strides (1, 5)
      one_channel = register_parameter("one_channel", torch::empty_strided({4, 1, 3, 3}, {9, 1, 3, 1}).normal_());  // as channels-last
    }
    Tensor forward(Tensor x) { return torch::conv2d(x, one_channel).mean() * column.mm(column.t()).sum(); }
    Tensor column, one_channel;
  };
  check_same_use<OnesImpl>(
      group, [] { return std::make_shared<OnesImpl>(); },
      [](Use<OnesImpl>& net) -> std::vector<Tensor> {
        auto loss = net(torch::randn({2, 1, 8, 8}));
        loss.backward();
        net.call([](OnesImpl& m) {
          EXPECT(m.column.strides() == torch::IntArrayRef({1, 5}), m.column.strides());
          EXPECT(m.one_channel.strides() == torch::IntArrayRef({9, 1, 3, 1}), m.one_channel.strides());
          return m.column.sum();
        });
        return {loss};
      });
}

// A one-element parameter and ranks without any element of a group: what has been dropped elsewhere.
RANKS_TEST("a group with fewer elements than ranks trains on all of them", "[wrappers][kinds][quick]", 1, 2, 3, 4) {
  struct TinyImpl : nn::Module {
    TinyImpl() { scale = register_parameter("scale", torch::ones({1})); }
    Tensor forward(Tensor x) { return (scale * x).sum(); }
    Tensor scale;
  };
  check_same_use<TinyImpl>(
      group, [] { return std::make_shared<TinyImpl>(); },
      [](Use<TinyImpl>& net) -> std::vector<Tensor> {
        torch::optim::Adam optimizer(net.parameters, 0.1);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          net(torch::ones({3})).backward();
          optimizer.step();
        }
        return {};
      });
}
