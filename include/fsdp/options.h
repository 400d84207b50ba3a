/// How a model is sharded. One aggregate; name what you set, in this order:
///
///     fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1'000'000)});
#pragma once

#include <fsdp/mixed_precision.h>
#include <fsdp/parameter_predicate.h>
#include <fsdp/wrap_policy.h>

#include <cstdint>
#include <optional>

namespace fsdp {

enum class ShardingStrategy {
  /// Parameters, gradients and optimizer state are spread over the ranks; a unit is gathered when it is read and freed when room is
  /// needed, so beside the root unit two units are whole at a time (ZeRO stage 3).
  FULL_SHARD,
  /// The same, but a unit that was gathered stays until the end of its backward: one gather per unit and step instead of two, for
  /// the memory of the whole model (ZeRO stage 2).
  SHARD_GRAD_OP,
};

/// What happens when the model writes to one of its parameters while the wrapper runs it.
enum class ParameterWrites {
  REFUSE,  ///< an error that names the parameter
  /// After the writing operator each rank keeps its own part of what was written. Every rank must write the same values: nothing is
  /// communicated, so differing ranks would end with a patchwork.
  WRITE_THROUGH,
};

/// When ranks compare what they are about to do before a collective. They always do so while an order is new.
enum class CheckOrder {
  ORDER_ON_CHANGE,  ///< when a rank is about to leave the order of the steps before
  ORDER_ALWAYS,     ///< before every collective of the group from now on, which costs a small all-gather each: for finding where ranks part
};

struct FsdpOptions {
  ShardingStrategy sharding_strategy = ShardingStrategy::FULL_SHARD;

  /// Which modules become units. None: one unit for everything, which is whole during forward and backward. Changes memory and
  /// speed, never results.
  WrapPolicy auto_wrap_policy = {};

  /// In what dtypes the model computes and communicates. Changes results.
  MixedPrecision mixed_precision = {};

  /// Parameters that stay whole on every rank, in their own dtype and shape, within any strategy: small adapters in a large sharded
  /// model. They start from rank 0's values (sync_module_states), their gradients are averaged over the ranks in buckets while
  /// backward goes on, and they count once in norms.
  ParameterPredicate unsharded = {};

  /// The most bytes that gathered parameters take at once on each rank, those of gathers under way included; one operator needs the
  /// root unit and its own. More of it saves gathers, never changes results. None: what the strategy says, for FULL_SHARD the root
  /// unit and the two largest others (an operator that needs more than that gets more), for SHARD_GRAD_OP everything. Less than the
  /// root unit and the largest other is an error that names the least value.
  std::optional<int64_t> max_unsharded_bytes = std::nullopt;

  /// true: every rank starts from rank 0's parameters and buffers. false: each keeps its own values; they must then be equal
  /// already, or the ranks' shards belong to different models.
  bool sync_module_states = true;

  /// Costs time, never changes results.
  CheckOrder check_order = CheckOrder::ORDER_ON_CHANGE;

  /// Data-dependent initialisation and masks written into weights need WRITE_THROUGH.
  ParameterWrites parameter_writes = ParameterWrites::REFUSE;
};

}  // namespace fsdp
