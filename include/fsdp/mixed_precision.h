/// In which dtypes a model computes, communicates and is kept.
///
///     fsdp::FullyShardedDataParallel model(net, group, {.mixed_precision = {.param_dtype = torch::kBFloat16}});
///
/// One rule for all strategies: floating parameters are kept as they are (the master, fp32 as a rule), cast to `param_dtype` before they
/// are gathered, computed with, and their gradients return to the master's dtype. An operator that reads a parameter which is kept wide
/// (below) runs wide: its other floating arguments of `param_dtype` are cast up, and its floating results return to `param_dtype`. An
/// operator that reads a parameter in `param_dtype` gets its wider floating arguments cast down when cast_forward_inputs is set. Both
/// are recorded by autograd.
#pragma once

#include <fsdp/parameter_predicate.h>

#include <c10/core/ScalarType.h>

#include <optional>

namespace fsdp {

struct MixedPrecision {
  /// What floating parameters are gathered and computed in, bf16 or fp16 as a rule. None: each its own dtype. Halves what gathers move
  /// and unsharded buffers take.
  std::optional<c10::ScalarType> param_dtype = std::nullopt;

  /// What gradients are summed up in over the ranks. None: the master's dtype. A narrower one halves what reductions move, and rounds.
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;

  /// What floating buffers become. None: they keep their dtype, as the running statistics of BatchNorm should. Integers always do.
  std::optional<c10::ScalarType> buffer_dtype = std::nullopt;

  /// What floating tensors that the wrapper's forward and call return become (also in vectors and tuples). None: as computed.
  std::optional<c10::ScalarType> output_dtype = std::nullopt;

  /// Floating tensors that meet a parameter in param_dtype are cast to it, so inputs may be fp32. false: such an operator sees what it is
  /// given, and LibTorch says what it thinks of different dtypes.
  bool cast_forward_inputs = true;

  /// Parameters that stay in their own dtype, beside those of LibTorch's norm modules (BatchNorm, LayerNorm, GroupNorm, InstanceNorm),
  /// which always do.
  ParameterPredicate keep_fp32 = {};

  /// Parameters that are frozen when the model is wrapped are kept in param_dtype, since nothing updates them: half the memory. To
  /// thaw one later it must have kept a master: true keeps them.
  bool keep_frozen_master = false;
};

}  // namespace fsdp
