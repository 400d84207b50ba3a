/// Which samples a rank trains on.
///
///     fsdp::DistributedSampler sampler(dataset.size().value(), group, {.seed = 7});
///     auto loader = torch::data::make_data_loader(dataset, sampler, /*batch_size=*/32);   // 32 on each rank
///     for (int epoch = 0; epoch < epochs; ++epoch)
///       for (auto& batch : *loader) ...
///
/// The stream. All ranks read one endless stream of indices: permutation 0 of [0, size), then permutation 1, and so on, each made
/// from (seed, its number), equal on every machine; 0, 1, ..., size-1 each time where shuffling is off. A global step takes the
/// next world_size · batch indices of the stream, and rank r gets the r-th contiguous block of `batch` of them. The position in
/// the stream is all that must be remembered: a run may go on with another world size or batch and neither skips nor repeats.
///
/// Epochs. An epoch ends, on all ranks alike, when fewer than world_size · batch indices are left of its permutation; they open
/// the next epoch. So every batch is full, every rank makes the same number of steps, and n epochs hand out each sample n times,
/// but for the tail that still waits. (Where size < world_size · batch, an epoch takes in as many permutations as a step needs.)
///
/// A loader holds a copy of the sampler. Copies are handles to one stream, so position(), state() and save() of yours tell what
/// the loader's has handed out; two loaders on one sampler share out one stream between them.
///
/// position() counts indices handed out, not trained on: the two agree for a loader without workers, but workers read up to
/// `max_jobs` batches ahead. With workers, take state() before the epoch's loop and add world_size · batch to its position for
/// every step done; keep and restore that.
///
/// Thread safety: one thread at a time for all copies together (a loader asks from the thread that iterates over it).
/// Mistakes throw c10::Error and change nothing.
#pragma once

#include <fsdp/export.h>

#include <torch/data/samplers/base.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace fsdp {

struct DistributedSamplerOptions {
  /// False: every permutation is 0, 1, ..., size-1.
  bool shuffle = true;

  /// Chooses the permutations. Equal on all ranks, or ranks train on overlapping samples: the sampler does not communicate.
  std::uint64_t seed = 0;
};

class FSDP_API DistributedSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Where a run stands in which stream; the same on all ranks between two steps, so one rank's is enough to keep.
  struct State {
    std::int64_t position = 0;  ///< indices handed out so far, all ranks together
    std::int64_t epoch = 0;     ///< the epoch that the next index belongs to
    std::int64_t size = 0;
    std::uint64_t seed = 0;
    bool shuffle = true;

    bool operator==(const State&) const = default;
  };

  /// REQUIRES: size ≥ 1, 0 ≤ rank < world_size. Where it shuffles, it holds one permutation in memory: 8 bytes per sample.
  DistributedSampler(std::size_t size, int rank, int world_size, DistributedSamplerOptions options = {});

  /// The same for a group: anything with rank() and world_size(), such as fsdp::ProcessGroup.
  template <class Group>
  requires requires(const Group& group) {
    { group.rank() } -> std::convertible_to<int>;
    { group.world_size() } -> std::convertible_to<int>;
  }
  DistributedSampler(std::size_t size, const Group& group, DistributedSamplerOptions options = {})
      : DistributedSampler(size, group.rank(), group.world_size(), options) {}

  // Declared so that there is no move: a sampler moved from would be a handle to nothing.
  DistributedSampler(const DistributedSampler&) = default;
  DistributedSampler& operator=(const DistributedSampler&) = default;

  /// This rank's `batch` indices of the next global step; nothing at the end of the epoch, and from then on until reset().
  /// REQUIRES: batch ≥ 1 and, at each step, equal on all ranks.
  std::optional<std::vector<std::size_t>> next(std::size_t batch) override;

  /// Goes on with the next epoch if the current one has ended, else does nothing: a loader calls this whenever a loop over it
  /// begins, also the first one and the first after load(), and a loop left early is thereby taken up where it stopped. A loop
  /// never begins empty: an epoch with too few indices left for one step passes them on to the next.
  /// REQUIRES: new_size, where given, is size(): another size is another stream, hence another sampler.
  void reset(std::optional<std::size_t> new_size = std::nullopt) override;

  std::size_t size() const;       ///< samples in the dataset
  std::int64_t position() const;  ///< indices handed out so far, all ranks together
  std::int64_t epoch() const;     ///< the current epoch; an ended one is current until reset()

  State state() const;

  /// Goes on from a state. REQUIRES: its size, seed and shuffle are this sampler's, position and epoch are not negative.
  void set_state(const State& state);

  /// state() in an archive, and back. Rank, world size and batch are no part of it.
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;

 private:
  struct Stream;
  std::shared_ptr<Stream> stream_;
};

}  // namespace fsdp
