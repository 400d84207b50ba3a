// The gradient accumulator of a sharded parameter.
//
// LibTorch's own accumulator keeps the shape and dtype of the state it was made in and writes .grad; a parameter that changes its
// shape between forward and optimizer step can use neither. This one is made once, in the computing state, is owned by the
// parameter's group, and hands the finished gradient to the model instead.
#pragma once

#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <memory>

namespace fsdp {

class ShardedModel;
struct ShardedParameter;

class GradientSink : public torch::autograd::AccumulateGrad {
 public:
  // REQUIRES: the parameter's handle is in the computing state.
  GradientSink(ShardedParameter& parameter, std::weak_ptr<ShardedModel> model);

  // Called once per graph task, by whichever thread runs it; the gradient may be undefined. Throws if the model is gone.
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override;

 private:
  ShardedParameter* parameter_;  // lives as long as the model
  std::weak_ptr<ShardedModel> model_;
};

}  // namespace fsdp
