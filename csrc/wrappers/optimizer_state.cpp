#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/optimizer_state.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "runtime/sharded_model.h"

namespace fsdp {
namespace {

namespace optim = torch::optim;

struct StateTensor {
  const char* name;
  at::Tensor* tensor;  // undefined where the optimizer's options do not ask for it
};

// LibTorch's states share no interface: each type lists its own tensors.
std::vector<StateTensor> tensors_of(optim::OptimizerParamState& state, const std::string& parameter) {
  if (auto* sgd = dynamic_cast<optim::SGDParamState*>(&state)) return {{"momentum_buffer", &sgd->momentum_buffer()}};
  if (auto* adam = dynamic_cast<optim::AdamParamState*>(&state))
    return {{"exp_avg", &adam->exp_avg()}, {"exp_avg_sq", &adam->exp_avg_sq()}, {"max_exp_avg_sq", &adam->max_exp_avg_sq()}};
  if (auto* adamw = dynamic_cast<optim::AdamWParamState*>(&state))
    return {{"exp_avg", &adamw->exp_avg()}, {"exp_avg_sq", &adamw->exp_avg_sq()}, {"max_exp_avg_sq", &adamw->max_exp_avg_sq()}};
  if (auto* rmsprop = dynamic_cast<optim::RMSpropParamState*>(&state))
    return {{"square_avg", &rmsprop->square_avg()}, {"momentum_buffer", &rmsprop->momentum_buffer()}, {"grad_avg", &rmsprop->grad_avg()}};
  if (auto* adagrad = dynamic_cast<optim::AdagradParamState*>(&state)) return {{"sum", &adagrad->sum()}};
  TORCH_CHECK(false, "shard_optimizer_state: the optimizer keeps state of a type of its own for parameter '", parameter,
              "'; known are those of SGD, Adam, AdamW, RMSprop and Adagrad. Build the optimizer after wrapping, so that its state begins "
              "with this rank's slices");
}

}  // namespace

void shard_optimizer_state(optim::Optimizer& optimizer, const FullyShardedBase& wrapper) {
  TORCH_CHECK(!dynamic_cast<optim::LBFGS*>(&optimizer),
              "shard_optimizer_state: torch::optim::LBFGS keeps one state for all parameters together and compares whole gradients; it "
              "cannot train a sharded model. Use SGD, Adam, AdamW, RMSprop or Adagrad");
  c10::AutoGradMode no_grad(false);
  std::vector<std::pair<at::Tensor*, at::Tensor>> changes;
  for (const auto& unit : wrapper.model()->units())
    for (const auto& group : unit->groups)
      for (const auto& parameter : group->parameters) {
        const auto found = optimizer.state().find(parameter.handle.unsafeGetTensorImpl());
        if (found == optimizer.state().end()) continue;
        const ShardSlice part = group->layout.slice(parameter.index, group->rank);
        for (const auto& [name, tensor] : tensors_of(*found->second, parameter.name)) {
          if (!tensor->defined() || tensor->sizes() == parameter.slice.sizes()) continue;
          TORCH_CHECK(tensor->sizes() == at::IntArrayRef(parameter.full_shape), "rank ", group->rank, ": shard_optimizer_state: ", name,
                      " of parameter '", parameter.name, "' has shape ", tensor->sizes(), "; expected the parameter's full shape ",
                      at::IntArrayRef(parameter.full_shape), " or this rank's slice ", parameter.slice.sizes(),
                      ". Nothing was changed; build the optimizer anew");
          // A copy: a view would keep the whole state alive.
          changes.emplace_back(tensor, parameter.in_memory_order(*tensor).narrow(0, part.begin_in_parameter, part.length).clone());
        }
      }
  for (auto& [tensor, slice] : changes) *tensor = std::move(slice);
}

}  // namespace fsdp
