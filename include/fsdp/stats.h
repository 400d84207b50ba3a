/// What a wrapped model has communicated and holds.
///
///     const fsdp::Stats stats = model.stats();
///     std::cout << stats.collectives.all_gather.calls << " gathers, at most " << stats.peak_unsharded_bytes << " bytes unsharded\n";
#pragma once

#include <cstdint>

namespace fsdp {

struct CollectiveCount {
  int64_t calls = 0;
  int64_t bytes = 0;  ///< of the whole buffer (N ranks' parts), padding included; what travels depends on the backend
};

/// Since the model was wrapped. Counted where the library asks for them: a backend may carry one out as another. All zero at world
/// size 1, where nothing is communicated.
struct CollectiveCounts {
  CollectiveCount all_gather;
  CollectiveCount reduce_scatter;
  CollectiveCount all_reduce;
  CollectiveCount broadcast;
};

struct Stats {
  CollectiveCounts collectives;
  int64_t shard_bytes = 0;                 ///< parameters at rest: this rank's shards
  int64_t gradient_bytes = 0;              ///< gradients at rest; 0 before the first backward
  int64_t resident_unsharded_bytes = 0;    ///< unsharded buffers that hold memory now
  int64_t peak_unsharded_bytes = 0;        ///< the most that `resident_unsharded_bytes` has been
  int64_t prefetches = 0;                  ///< gathers that were started before their unit was read
  int64_t prefetch_hits = 0;               ///< those whose unit was read before it was freed
  int64_t buffer_allocations = 0;          ///< how often memory was taken for unsharded and gradient buffers
  int64_t peak_gradient_buffer_bytes = 0;  ///< the most that buffers for whole, not yet reduced gradients have taken at once
};

}  // namespace fsdp
