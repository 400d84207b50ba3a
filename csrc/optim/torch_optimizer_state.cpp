#include "optim/torch_optimizer_state.h"

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace fsdp {

namespace optim = torch::optim;

TorchParameterState look_into(optim::OptimizerParamState& state, const std::string& where) {
  if (auto* sgd = dynamic_cast<optim::SGDParamState*>(&state)) return {{{"momentum_buffer", &sgd->momentum_buffer()}}};
  if (auto* s = dynamic_cast<optim::AdamParamState*>(&state))
    return {{{"exp_avg", &s->exp_avg()}, {"exp_avg_sq", &s->exp_avg_sq()}, {"max_exp_avg_sq", &s->max_exp_avg_sq()}}, s->step()};
  if (auto* s = dynamic_cast<optim::AdamWParamState*>(&state))
    return {{{"exp_avg", &s->exp_avg()}, {"exp_avg_sq", &s->exp_avg_sq()}, {"max_exp_avg_sq", &s->max_exp_avg_sq()}}, s->step()};
  if (auto* s = dynamic_cast<optim::RMSpropParamState*>(&state))
    return {{{"square_avg", &s->square_avg()}, {"momentum_buffer", &s->momentum_buffer()}, {"grad_avg", &s->grad_avg()}}, s->step()};
  if (auto* s = dynamic_cast<optim::AdagradParamState*>(&state)) return {{{"sum", &s->sum()}}, s->step()};
  TORCH_CHECK(
      false, where,
      ": the optimizer keeps state of a type of its own; known are those of SGD, Adam, AdamW, RMSprop and Adagrad. Build the optimizer "
      "after wrapping, so that its state begins with this rank's slices");
}

const char* type_of(const optim::Optimizer& optimizer) {
  if (dynamic_cast<const optim::SGD*>(&optimizer)) return "torch::optim::SGD";
  if (dynamic_cast<const optim::Adam*>(&optimizer)) return "torch::optim::Adam";
  if (dynamic_cast<const optim::AdamW*>(&optimizer)) return "torch::optim::AdamW";
  if (dynamic_cast<const optim::RMSprop*>(&optimizer)) return "torch::optim::RMSprop";
  if (dynamic_cast<const optim::Adagrad*>(&optimizer)) return "torch::optim::Adagrad";
  TORCH_CHECK(!dynamic_cast<const optim::LBFGS*>(&optimizer),
              "torch::optim::LBFGS keeps one state for all parameters together, which cannot be saved in slices");
  TORCH_CHECK(false, "the optimizer is none of torch::optim's SGD, Adam, AdamW, RMSprop and Adagrad, nor fsdp::AdamW or fsdp::Adam");
}

std::unique_ptr<optim::OptimizerParamState> new_state(const optim::Optimizer& optimizer, int64_t step) {
  const auto stepped = [&](auto state) {
    state->step(step);
    return state;
  };
  if (dynamic_cast<const optim::SGD*>(&optimizer)) return std::make_unique<optim::SGDParamState>();
  if (dynamic_cast<const optim::Adam*>(&optimizer)) return stepped(std::make_unique<optim::AdamParamState>());
  if (dynamic_cast<const optim::AdamW*>(&optimizer)) return stepped(std::make_unique<optim::AdamWParamState>());
  if (dynamic_cast<const optim::RMSprop*>(&optimizer)) return stepped(std::make_unique<optim::RMSpropParamState>());
  return stepped(std::make_unique<optim::AdagradParamState>());
}

}  // namespace fsdp
