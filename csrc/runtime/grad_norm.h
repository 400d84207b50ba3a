// Gradient norm and clipping over sharded gradients.
#pragma once

#include <fsdp/clip_result.h>

#include "runtime/sharded_model.h"

namespace fsdp {

// p-norm over those of `parameters` that have a .grad, each element counted once; one all-reduce, in which a rank takes part whatever it
// holds. All ranks must call. norm_type: above 0, or infinity. `parameters`: the model's handles, each once, in the order of the plain
// module's parameters(): the norm's last bit depends on it.
ClipResult clip_gradients(ShardedModel& model, const std::vector<at::Tensor>& parameters, double max_norm, double norm_type);

// Brings every element of the gradients into [-clip_value, clip_value]; NaN stays. Nothing is communicated.
void clip_gradient_values(const ShardedModel& model, const std::vector<at::Tensor>& parameters, double clip_value);

}  // namespace fsdp
