/// Optimizers that hold state of the full shape when their model is wrapped.
///
///     torch::optim::Adagrad optimizer(net->parameters());       // allocates its state here
///     fsdp::FullyShardedDataParallel model(net, group);
///     fsdp::shard_optimizer_state(optimizer, model);            // once, before the first step
///
/// Most optimizers make their state in the first step and need nothing: SGD, Adam, AdamW, RMSprop built before or after wrapping. Adagrad
/// makes it in its constructor, and any optimizer has state once it has stepped. Without this call the next step throws, somewhere in
/// the middle: what it had changed of the state by then stays changed.
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
/// shape already, and that of parameters outside `model`, is left alone, so calling twice does no harm. All ranks must call: they
/// compare what they hold, since slices of different histories would make one patchwork.
///
/// Throws c10::Error on all ranks before anything changes: for LBFGS, whose state spans all parameters; for state of an optimizer not in
/// torch::optim; for state of any other shape, and state that differs between ranks, naming the parameter.
FSDP_API void shard_optimizer_state(torch::optim::Optimizer& optimizer, const FullyShardedBase& model);

}  // namespace fsdp
