// Parameters that cannot be sharded, and calls at the wrong time: each named, and the group and the rest usable afterwards.

#include <fsdp/fsdp.h>

#include "support/expect_contains.h"
#include "support/expect_trains.h"
#include "support/models.h"
#include "support/ranks.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

struct OneImpl : nn::Module {
  explicit OneImpl(torch::Tensor value, bool requires_grad = true) { register_parameter("odd", std::move(value), requires_grad); }
};

std::string refusal(fsdp::ProcessGroup& group, torch::Tensor value, bool requires_grad = true) {
  return error_of([&] { fsdp::FullyShardedDataParallel model(std::make_shared<OneImpl>(value, requires_grad), group); });
}

}  // namespace

RANKS_TEST("parameters that cannot be sharded are refused by name", "[wrappers][errors][quick]", 1, 2) {
  expect_contains(refusal(group, torch::eye(3).to_sparse(), false), {"'odd'", "layout Sparse"});
  expect_contains(refusal(group, torch::empty({3}, torch::kMeta)), {"'odd'", "device meta", "expected cpu"});
  expect_contains(refusal(group, torch::quantize_per_tensor(torch::ones({3}), 0.1, 0, torch::kQInt8), false), {"'odd'", "quantized"});
  expect_contains(refusal(group, torch::ones({3}).requires_grad_() * 2), {"'odd'", "not a leaf"});
  torch::Tensor inference;
  {
    c10::InferenceMode guard;
    inference = torch::ones({3});
  }
  expect_contains(refusal(group, inference, false), {"'odd'", "InferenceMode"});
  Mlp net;
  fsdp::FullyShardedDataParallel model(net, group);
  expect_trains(model, group, std::make_shared<MlpImpl>(), [] { return torch::randn({4, 6}); });
}

RANKS_TEST("unwrapping while the model runs, and backward after its wrapper is gone", "[wrappers][errors][quick]", 1, 2) {
  Mlp net;
  torch::Tensor loss;
  {
    fsdp::FullyShardedDataParallel model(net, group);
    expect_contains(error_of([&] { model.call([&](MlpImpl&) { model.unwrap(); }); }), {"unwrap() while the model is running"});
    loss = model(torch::randn({4, 6})).sum();
  }
  expect_contains(error_of([&] { loss.backward(); }), {"destroyed", "keep the wrapper alive"});
  Mlp other;
  fsdp::FullyShardedDataParallel model(other, group);
  expect_trains(model, group, std::make_shared<MlpImpl>(), [] { return torch::randn({4, 6}); });
}
