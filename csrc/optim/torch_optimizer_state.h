// What LibTorch's optimizers keep of a parameter. Their states share no interface: each type lists its own tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <memory>
#include <string>
#include <vector>

namespace fsdp {

struct StateTensor {
  const char* name;
  at::Tensor* tensor;  // undefined where the optimizer's options do not ask for it
};

struct TorchParameterState {
  std::vector<StateTensor> tensors;
  int64_t step = 0;
};

// Throws c10::Error that begins with `where` for state of an optimizer that is not LibTorch's.
TorchParameterState look_into(torch::optim::OptimizerParamState& state, const std::string& where);

// "torch::optim::AdamW". Throws c10::Error for LBFGS, whose state spans all parameters, and for what is not LibTorch's.
const char* type_of(const torch::optim::Optimizer& optimizer);

// Of a parameter that the optimizer has not stepped yet: no tensors, and that many steps.
std::unique_ptr<torch::optim::OptimizerParamState> new_state(const torch::optim::Optimizer& optimizer, int64_t step);

}  // namespace fsdp
