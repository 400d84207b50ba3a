#include "runtime/gradient_sink.h"

#include <c10/util/Exception.h>

#include "runtime/sharded_model.h"

namespace fsdp {

GradientSink::GradientSink(ShardedParameter& parameter, std::weak_ptr<ShardedModel> model)
    : AccumulateGrad(parameter.handle), parameter_(&parameter), model_(std::move(model)) {}

torch::autograd::variable_list GradientSink::apply(torch::autograd::variable_list&& gradients) {
  const auto model = model_.lock();
  TORCH_CHECK(model, "backward reached a parameter whose sharded model was destroyed; keep the wrapper alive until backward is done");
  model->receive_gradient(*parameter_, gradients[0]);
  return {};
}

}  // namespace fsdp
