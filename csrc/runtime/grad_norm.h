// Gradient norm and clipping over sharded gradients.
#pragma once

#include <fsdp/clip_result.h>

#include "runtime/sharded_model.h"

namespace fsdp {

// 2-norm over all parameters that have a .grad, each element counted once; one all-reduce. All ranks must call.
ClipResult clip_gradients(ShardedModel& model, double max_norm);

}  // namespace fsdp
