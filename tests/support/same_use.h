// One piece of user code run on a plain and on a sharded model, every rank with the same data: values, gradients and parameters must
// be bit-equal at world sizes 1 and 2 (halves add up exactly), and close at others.
#pragma once

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <functional>
#include <memory>
#include <vector>

#include "support/parity.h"
#include "support/ranks.h"

namespace fsdp::testing {

// What user code needs of a model, wrapped or not.
template <class Impl>
struct Use {
  std::shared_ptr<Impl> module;
  std::function<torch::Tensor(const std::function<torch::Tensor(Impl&)>&)> call;  // runs it where parameters may be read
  std::vector<torch::Tensor> parameters;                                          // each once; for optimizers
  bool sharded = false;

  torch::Tensor operator()(torch::Tensor x) const {
    return call([&](Impl& m) { return m.forward(x); });
  }
};

inline bool exact(int world_size) { return world_size <= 2; }

inline void expect_equal(const torch::Tensor& got, const torch::Tensor& want, int world_size, const std::string& what) {
  EXPECT(got.defined() == want.defined(),
         what << (got.defined() ? " is defined, in the plain run it is not" : " is undefined, in the plain run it is not"));
  if (!got.defined()) return;
  EXPECT(got.sizes() == want.sizes(), what << " has shape " << got.sizes() << ", in the plain run " << want.sizes());
  if (exact(world_size)) {
    EXPECT(torch::equal(got, want),
           what << " is not bit-equal to the plain run; largest difference " << (got - want).abs().max().template item<double>());
  } else {
    const auto wide = want.is_complex() ? torch::kComplexDouble : torch::kDouble;
    const double difference = (got.to(wide) - want.to(wide)).abs().norm().item<double>(), norm = want.to(wide).abs().norm().item<double>();
    EXPECT(difference <= 1e-5 * norm + 1e-9, what << " differs from the plain run by " << difference << " at a norm of " << norm);
  }
}

// use(Use<Impl>&) → tensors to compare. Afterwards parameters and gradients are compared, and the sharded model must rest.
template <class Impl, class Function>
void check_same_use(ProcessGroup& group, const std::function<std::shared_ptr<Impl>()>& make, Function use,
                    FsdpOptions options = {.auto_wrap_policy = size_based_auto_wrap_policy(1)}) {
  torch::manual_seed(21);
  auto plain = make(), module = make();
  copy_values(*module, *plain);

  Use<Impl> on_plain{plain, [&](const std::function<torch::Tensor(Impl&)>& f) { return f(*plain); }, unique_parameters(*plain), false};
  torch::manual_seed(22);
  const std::vector<torch::Tensor> want = use(on_plain);

  FullyShardedDataParallel model(module, group, options);
  Use<Impl> on_sharded{module, [&](const std::function<torch::Tensor(Impl&)>& f) { return model.call(f); }, model.parameters(), true};
  torch::manual_seed(22);
  const std::vector<torch::Tensor> got = use(on_sharded);

  EXPECT(got.size() == want.size(), got.size() << " results instead of " << want.size());
  for (size_t i = 0; i < got.size(); ++i)
    expect_equal(got[i].detach(), want[i].detach(), group.world_size(), "result " + std::to_string(i));
  model.unwrap();
  const auto reference = plain->named_parameters();
  for (const auto& item : module->named_parameters()) {
    torch::NoGradGuard no_grad;
    expect_equal(item.value(), reference[item.key()], group.world_size(), item.key());
    expect_equal(item.value().grad(), reference[item.key()].grad(), group.world_size(), "the gradient of " + item.key());
  }
}

}  // namespace fsdp::testing
