// After an error the model trains on, and rightly: the same steps on a plain model that begins with its values give the same numbers.
#pragma once

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <memory>

#include "support/parity.h"

namespace fsdp::testing {

// All ranks must call. `plain`: of the same build as the wrapped module; its values are overwritten.
template <class Impl>
void expect_trains(FullyShardedDataParallel<Impl>& model, const ProcessGroup& group, std::shared_ptr<Impl> plain,
                   const std::function<torch::Tensor()>& input) {
  {
    auto full = model.summon_full_params();
    copy_values(*plain, *model.module());
  }
  model.zero_grad();
  torch::optim::Adam optimizer(model.parameters(), 1e-2), plain_optimizer(unique_parameters(*plain), 1e-2);
  torch::manual_seed(11);  // the same data on all ranks
  for (int step = 0; step < 2; ++step) {
    const auto x = input();
    auto loss = model(x).square().mean(), plain_loss = plain->forward(x).square().mean();
    loss.backward();
    plain_loss.backward();
    expect_same_loss(loss.template item<double>(), plain_loss.template item<double>(), group.world_size(), step);
    for (auto* each : {&optimizer, &plain_optimizer}) {
      each->step();
      each->zero_grad();
    }
  }
  expect_same_parameters(model, *plain, group.world_size());
}

}  // namespace fsdp::testing
