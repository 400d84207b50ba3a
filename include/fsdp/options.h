/// How a model is sharded. One aggregate; name what you set, in this order:
///
///     fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1'000'000)});
#pragma once

#include <fsdp/wrap_policy.h>

namespace fsdp {

enum class ShardingStrategy {
  /// Parameters, gradients and optimizer state are spread over the ranks; a unit is gathered when it is read and freed when room is
  /// needed, so beside the root unit two units are whole at a time (ZeRO stage 3).
  FULL_SHARD,
};

/// What happens when the model writes to one of its parameters while the wrapper runs it.
enum class ParameterWrites {
  REFUSE,  ///< an error that names the parameter
  /// After the writing operator each rank keeps its own part of what was written. Every rank must write the same values: nothing is
  /// communicated, so differing ranks would end with a patchwork.
  WRITE_THROUGH,
};

struct FsdpOptions {
  ShardingStrategy sharding_strategy = ShardingStrategy::FULL_SHARD;

  /// Which modules become units. None: one unit for everything, which is whole during forward and backward. Changes memory and
  /// speed, never results.
  WrapPolicy auto_wrap_policy = {};

  /// true: every rank starts from rank 0's parameters and buffers. false: each keeps its own values; they must then be equal
  /// already, or the ranks' shards belong to different models.
  bool sync_module_states = true;

  /// Data-dependent initialisation and masks written into weights need WRITE_THROUGH.
  ParameterWrites parameter_writes = ParameterWrites::REFUSE;
};

}  // namespace fsdp
