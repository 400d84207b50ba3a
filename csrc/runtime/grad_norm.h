// Gradient norm and clipping over sharded gradients.
#pragma once

#include <fsdp/clip_result.h>

#include "runtime/sharded_model.h"

namespace fsdp {

// 2-norm over those of `parameters` that have a .grad, each element counted once; one all-reduce. All ranks must call. `parameters`: the
// model's handles, each once, in the order of the plain module's parameters(): the norm's last bit depends on it.
ClipResult clip_gradients(ShardedModel& model, const std::vector<at::Tensor>& parameters, double max_norm);

}  // namespace fsdp
