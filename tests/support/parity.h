// Sharded training against plain training.
//
// The reference, on every rank for itself: one plain copy of the model per rank, all with rank 0's weights; rank r's copy has rank
// r's generator state, buffers and batch; gradients averaged in rank order; one optimizer step. At world size 1 the sharded run
// must be bit-equal to it; over ranks losses agree within 1e-5 relative, parameters and buffers within 1e-5 of their tensor's norm,
// buffers of integers exactly. Each rank compares its own buffers with those of its own copy.
#pragma once

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <vector>

#include "support/ranks.h"

namespace fsdp::testing {

inline uint64_t seed_of(int step, int rank) { return 1000 * step + rank + 1; }

// A copy with equal values that shares nothing, ties included. Impl must be constructible by `make`.
template <class Impl>
void copy_values(Impl& to, Impl& from) {
  torch::NoGradGuard no_grad;
  auto into = to.parameters(), out = from.parameters();
  for (size_t i = 0; i < into.size(); ++i) into[i].copy_(out[i]);
  auto into_buffers = to.buffers(), out_buffers = from.buffers();
  for (size_t i = 0; i < into_buffers.size(); ++i) into_buffers[i].copy_(out_buffers[i]);
}

// Each tensor once: LibTorch lists a tied one as often as it is registered.
template <class Impl>
std::vector<torch::Tensor> unique_parameters(Impl& module) {
  std::vector<torch::Tensor> unique;
  for (auto& p : module.parameters()) {
    bool known = false;
    for (auto& u : unique) known = known || u.is_same(p);
    if (!known) unique.push_back(p);
  }
  return unique;
}

template <class Impl>
class Reference {
 public:
  // make() returns shared_ptr<Impl> and may draw random numbers. make_optimizer(parameters) returns unique_ptr<Optimizer>.
  template <class Make, class MakeOptimizer>
  Reference(int world_size, Impl& initial, Make make, MakeOptimizer make_optimizer) {
    for (int r = 0; r < world_size; ++r) {
      copies_.push_back(make());
      copy_values(*copies_.back(), initial);
    }
    optimizer_ = make_optimizer(unique_parameters(*copies_[0]));
  }

  // loss(module, rank) runs forward on rank's batch. Returns every rank's loss.
  template <class Loss>
  std::vector<double> step(int step, Loss loss) {
    const int world_size = static_cast<int>(copies_.size());
    std::vector<double> losses;
    std::vector<std::vector<torch::Tensor>> parameters;
    for (int r = 0; r < world_size; ++r) {
      torch::manual_seed(seed_of(step, r));
      auto value = loss(*copies_[r], r);
      value.backward();
      losses.push_back(value.template item<double>());
      parameters.push_back(unique_parameters(*copies_[r]));
    }
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters[0].size(); ++i) {
      torch::Tensor mean;
      for (int r = 0; r < world_size; ++r) {
        auto& grad = parameters[r][i].mutable_grad();
        if (!grad.defined()) continue;
        auto part = world_size == 1 ? grad.clone() : grad / world_size;
        mean = mean.defined() ? mean + part : part;
      }
      parameters[0][i].mutable_grad() = mean;
    }
    if (max_norm > 0) torch::nn::utils::clip_grad_norm_(parameters[0], max_norm);
    optimizer_->step();
    for (int r = 0; r < world_size; ++r)
      for (size_t i = 0; i < parameters[0].size(); ++i) {
        if (r) parameters[r][i].copy_(parameters[0][i]);
        parameters[r][i].mutable_grad().reset();
      }
    return losses;
  }

  Impl& copy(int rank) { return *copies_[rank]; }
  double max_norm = 0;  // > 0: clip before the step

 private:
  std::vector<std::shared_ptr<Impl>> copies_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

// What may stay gathered between steps: values of frozen units do not change.
inline int64_t frozen_unsharded_bytes(const Plan& plan) {
  int64_t bytes = 0;
  for (const auto& unit : plan.units) {
    bool frozen = true;
    for (const auto& group : unit.groups) frozen = frozen && !group.trainable;
    if (frozen) bytes += unit.unsharded_bytes(plan.world_size);
  }
  return bytes;
}

inline void expect_same_loss(double got, double want, int world_size, int step) {
  const bool same = world_size == 1 ? got == want : std::abs(got - want) <= 1e-5 * std::abs(want);
  EXPECT(same, "step " << step << ": loss " << got << " differs from the reference's " << want << " by " << got - want);
}

inline void expect_close(const torch::Tensor& got, const torch::Tensor& want, int world_size, const std::string& name) {
  EXPECT(got.sizes() == want.sizes(), name << " has shape " << got.sizes() << ", in the reference " << want.sizes());
  if (world_size == 1 || !want.is_floating_point()) {
    EXPECT(torch::equal(got, want), name << " is not bit-equal to the reference; largest difference "
                                         << (got.to(torch::kDouble) - want.to(torch::kDouble)).abs().max().item<double>());
  } else if (want.numel()) {
    const double difference = (got - want).norm().item<double>(), norm = want.norm().item<double>();
    EXPECT(difference <= 1e-5 * norm, name << " differs from the reference by " << difference << " at a norm of " << norm);
  }
}

// `skip`: names of parameters whose true gradient is zero, which Adam moves by rounding noise.
template <class Model, class Impl>
void expect_same_parameters(Model& model, Impl& reference, int world_size, const std::vector<std::string>& skip = {}) {
  auto full = model.summon_full_params();
  torch::NoGradGuard no_grad;
  const auto named = reference.named_parameters();
  for (const auto& item : model.named_parameters()) {
    if (world_size > 1 && std::find(skip.begin(), skip.end(), item.key()) != skip.end()) continue;
    expect_close(item.value().clone(), named[item.key()], world_size, item.key());
  }
}

template <class Impl>
void expect_same_buffers(Impl& module, Impl& reference, int world_size) {
  const auto want = reference.named_buffers();
  for (const auto& item : module.named_buffers()) expect_close(item.value(), want[item.key()], world_size, "buffer " + item.key());
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;

struct ParityOptions {
  FsdpOptions fsdp = {};
  int steps = 4;
  double learning_rate = 1e-2;
  double max_norm = 0;  // > 0: clip
  bool optimizer_before_wrapping = true;
  std::vector<std::string> skip = {};
  MakeOptimizer make_optimizer = {};  // empty: AdamW with `learning_rate`
  std::function<void(torch::optim::Optimizer&, const FullyShardedBase&)> after_wrapping = {};
};

// batch(rank, step) → whatever loss(module, batch) takes. The loss runs inside model.call.
template <class Impl, class Batch, class Loss>
void check_parity(ProcessGroup& group, const std::function<std::shared_ptr<Impl>()>& make, Batch batch, Loss loss,
                  const ParityOptions& options = {}) {
  const MakeOptimizer make_optimizer = options.make_optimizer ? options.make_optimizer : [&](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(options.learning_rate));
  };
  torch::manual_seed(7);  // all ranks alike: the reference below needs rank 0's values
  auto module = make();
  Reference<Impl> reference(group.world_size(), *module, make, make_optimizer);
  reference.max_norm = options.max_norm;
  if (group.rank() > 0) {  // what the broadcast at wrap must repair
    torch::NoGradGuard no_grad;
    for (auto& p : module->parameters()) p.add_(group.rank());
  }
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (options.optimizer_before_wrapping) optimizer = make_optimizer(unique_parameters(*module));
  FullyShardedDataParallel model(module, group, options.fsdp);
  if (!options.optimizer_before_wrapping) optimizer = make_optimizer(model.parameters());
  if (options.after_wrapping) options.after_wrapping(*optimizer, model);

  for (int step = 0; step < options.steps; ++step) {
    torch::manual_seed(seed_of(step, group.rank()));
    auto value = model.call([&](Impl& m) { return loss(m, batch(group.rank(), step)); });
    value.backward();
    if (options.max_norm > 0) model.clip_grad_norm_(options.max_norm);
    optimizer->step();
    optimizer->zero_grad();
    const auto losses = reference.step(step, [&](Impl& m, int rank) { return loss(m, batch(rank, step)); });
    expect_same_loss(value.template item<double>(), losses[group.rank()], group.world_size(), step);
    expect_same_buffers(*module, reference.copy(group.rank()), group.world_size());
    EXPECT(model.stats().resident_unsharded_bytes <= frozen_unsharded_bytes(model.plan()),
           "step " << step << ": unsharded buffers of trainable units hold memory at rest");
  }
  expect_same_parameters(model, reference.copy(0), group.world_size(), options.skip);
}

}  // namespace fsdp::testing
