#include "plan/budget.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <functional>
#include <vector>

namespace fsdp {

UnshardedBudget choose_budget(const Plan& plan, const FsdpOptions& options, int rank) {
  const bool keeps_all = options.sharding_strategy == ShardingStrategy::SHARD_GRAD_OP;
  TORCH_CHECK(keeps_all || options.sharding_strategy == ShardingStrategy::FULL_SHARD, "rank ", rank, ": unknown sharding strategy ",
              static_cast<int>(options.sharding_strategy), "; expected ShardingStrategy::FULL_SHARD or SHARD_GRAD_OP");
  int64_t root = 0;
  const PlannedUnit* largest = nullptr;
  std::vector<int64_t> others;
  for (const auto& unit : plan.units) {
    const int64_t bytes = unit.unsharded_bytes(plan.world_size);
    if (unit.name.empty()) {
      root = bytes;
    } else {
      if (others.empty() || bytes > *std::max_element(others.begin(), others.end())) largest = &unit;
      others.push_back(bytes);
    }
  }
  std::sort(others.begin(), others.end(), std::greater<>());
  const int64_t least = root + (others.empty() ? 0 : others[0]);
  if (options.max_unsharded_bytes) {
    TORCH_CHECK(*options.max_unsharded_bytes >= least, "rank ", rank, ": FsdpOptions::max_unsharded_bytes is ",
                *options.max_unsharded_bytes, ", but the root unit (", root, " bytes)", largest ? " and the largest other, '" : "",
                largest ? largest->name : "", largest ? c10::str("' (", others[0], " bytes),") : "",
                " must be whole at once. Set it to at least ", least, ", or choose a wrap policy that makes smaller units");
    return {.bytes = *options.max_unsharded_bytes, .strict = true};
  }
  return {.bytes = keeps_all ? plan.unsharded_bytes() : least + (others.size() > 1 ? others[1] : 0)};
}

}  // namespace fsdp
