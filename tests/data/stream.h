// Samplers of all ranks of one run, side by side in one process: a sampler does not communicate, so no other process is needed.
#pragma once

#include <fsdp/distributed_sampler.h>

#include <catch2/catch_test_macros.hpp>

#include <cstddef>
#include <optional>
#include <vector>

namespace fsdp::testing {

using Indices = std::vector<std::size_t>;

struct Run {
  Run(std::size_t size, int world_size, DistributedSamplerOptions options = {}) {
    for (int rank = 0; rank < world_size; ++rank) {
      ranks.emplace_back(size, rank, world_size, options);
    }
  }

  // One global step: the ranks' batches in rank order. Nothing if the epoch has ended, which all ranks must say alike.
  std::optional<Indices> step(std::size_t batch) {
    Indices all;
    std::size_t ended = 0;
    for (auto& sampler : ranks) {
      if (const auto indices = sampler.next(batch)) {
        REQUIRE(indices->size() == batch);
        all.insert(all.end(), indices->begin(), indices->end());
      } else {
        ++ended;
      }
    }
    REQUIRE((ended == 0 || ended == ranks.size()));
    return ended ? std::nullopt : std::optional(all);
  }

  // What one loop hands out: reset, then steps until the epoch ends, or `steps` of them.
  Indices loop(std::size_t batch, int steps = -1) {
    for (auto& sampler : ranks) sampler.reset();
    Indices all;
    while (steps-- != 0) {
      const auto indices = step(batch);
      if (!indices) break;
      all.insert(all.end(), indices->begin(), indices->end());
    }
    return all;
  }

  std::vector<DistributedSampler> ranks;
};

// The first `length` indices of the stream, read by a single rank in steps of 1.
inline Indices stream(std::size_t size, std::size_t length, DistributedSamplerOptions options = {}) {
  Run alone(size, 1, options);
  Indices all;
  while (all.size() < length) {
    const auto epoch = alone.loop(1);
    all.insert(all.end(), epoch.begin(), epoch.end());
  }
  all.resize(length);
  return all;
}

inline void append(Indices& to, const Indices& from) { to.insert(to.end(), from.begin(), from.end()); }

}  // namespace fsdp::testing
