/// Optimizers that hold state of the full shape when their model is wrapped.
///
///     torch::optim::Adagrad optimizer(net->parameters());       // allocates its state here
///     fsdp::FullyShardedDataParallel model(net, group);
///     fsdp::shard_optimizer_state(optimizer, model);            // once, before the first step
///
/// Most optimizers make their state in the first step and need nothing: SGD, Adam, AdamW, RMSprop built before or after wrapping. Adagrad
/// makes it in its constructor, and any optimizer has state once it has stepped. Without this call the next step throws.
///
/// Thread safety: as FullyShardedDataParallel.
#pragma once

#include <fsdp/export.h>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

class FullyShardedBase;

/// Replaces state tensors of a parameter's full shape by this rank's slice of them; steps and options stay. State that has the slice's
/// shape already, and that of parameters outside `model`, is left alone, so calling twice does no harm. Every rank must call;
/// nothing is communicated. REQUIRES: the state is the same on all ranks, as it is where all made the same steps; otherwise each
/// parameter's state is put together from different histories.
///
/// Throws c10::Error before anything changes: for LBFGS, whose state spans all parameters; for state of an optimizer not in torch::optim;
/// for state of any other shape, naming the parameter.
FSDP_API void shard_optimizer_state(torch::optim::Optimizer& optimizer, const FullyShardedBase& model);

}  // namespace fsdp
