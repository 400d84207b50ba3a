// A module's own dictionary of parameters: named_parameters() would copy every tensor and name at each call.
#pragma once

#include <torch/nn/module.h>

namespace fsdp {

struct RegisteredParameters : torch::nn::Module {
  static const torch::OrderedDict<std::string, at::Tensor>& of(const torch::nn::Module& module) {
    return module.*&RegisteredParameters::parameters_;
  }
};

}  // namespace fsdp
