#include <fsdp/distributed_sampler.h>

#include "data/permutation.h"

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fsdp {

// The one thing that all copies of a sampler share.
struct DistributedSampler::Stream {
  std::int64_t size;
  std::int64_t rank;
  std::int64_t world_size;
  DistributedSamplerOptions options;

  std::int64_t position = 0;
  std::int64_t epoch = 0;
  // An epoch is fresh until its first step. How much a step takes is known only in next(), so that is where an epoch that could
  // not fill one is skipped.
  enum class Phase { FRESH, RUNNING, ENDED } phase = Phase::FRESH;

  std::vector<std::size_t> permutation = {};
  std::int64_t permutation_number = -1;  // -1: none yet

  std::size_t at(std::int64_t index) {
    const auto number = index / size;
    const auto place = static_cast<std::size_t>(index % size);
    if (!options.shuffle) {
      return place;
    }
    if (number != permutation_number) {
      permutation.resize(static_cast<std::size_t>(size));
      data::permute(options.seed, static_cast<std::uint64_t>(number), permutation);
      permutation_number = number;
    }
    return permutation[place];
  }
};

namespace {

constexpr auto kLargest = std::numeric_limits<std::int64_t>::max();

const char* shuffle_name(bool shuffle) { return shuffle ? "shuffle = true" : "shuffle = false"; }

}  // namespace

DistributedSampler::DistributedSampler(std::size_t size, int rank, int world_size, DistributedSamplerOptions options) {
  TORCH_CHECK(size >= 1 && size <= static_cast<std::size_t>(kLargest), "DistributedSampler: expected a dataset of 1 to ", kLargest,
              " samples, got ", size, ". Check that the dataset was loaded and give its size.");
  TORCH_CHECK(world_size >= 1, "DistributedSampler: expected a world size of at least 1, got ", world_size, " (with rank ", rank,
              "). The order is (size, rank, world_size); or give the process group instead of both.");
  TORCH_CHECK(rank >= 0 && rank < world_size, "DistributedSampler: expected a rank from 0 to ", world_size - 1, " at world size ",
              world_size, ", got ", rank, ". The order is (size, rank, world_size); or give the process group instead of both.");
  stream_ =
      std::make_shared<Stream>(Stream{.size = static_cast<std::int64_t>(size), .rank = rank, .world_size = world_size, .options = options});
}

std::optional<std::vector<std::size_t>> DistributedSampler::next(std::size_t batch) {
  Stream& s = *stream_;
  TORCH_CHECK(batch >= 1, "DistributedSampler::next: expected a batch of at least 1 sample per rank, got 0. Give the loader a batch_size.");
  // The end of the epoch after this step must be a number, too.
  const auto room = static_cast<std::size_t>((kLargest - s.position - s.size) / s.world_size);
  TORCH_CHECK(batch <= room, "DistributedSampler::next: expected a batch of at most ", room, " samples per rank at position ", s.position,
              " and world size ", s.world_size, ", got ", batch, ". Give a smaller batch_size.");
  const auto per_rank = static_cast<std::int64_t>(batch);
  const auto end_of_step = s.position + s.world_size * per_rank;

  if (s.phase == Stream::Phase::FRESH) {
    s.epoch = std::max(s.epoch, (end_of_step - 1) / s.size);  // the first epoch whose permutation reaches that far
    s.phase = Stream::Phase::RUNNING;
  }
  // A loader with workers asks again after the end: the answer stays the same, whatever batch it asks for.
  if (s.phase == Stream::Phase::ENDED || (end_of_step - 1) / s.size > s.epoch) {
    s.phase = Stream::Phase::ENDED;
    return std::nullopt;
  }

  std::vector<std::size_t> indices;
  indices.reserve(batch);
  const auto begin = s.position + s.rank * per_rank;
  for (auto index = begin; index < begin + per_rank; ++index) {
    indices.push_back(s.at(index));
  }
  s.position = end_of_step;
  return indices;
}

void DistributedSampler::reset(std::optional<std::size_t> new_size) {
  TORCH_CHECK(!new_size || *new_size == size(), "DistributedSampler::reset: expected the size that the sampler was made with, ", size(),
              ", got ", new_size.value_or(0), ". Positions of one size mean nothing in another: make a new sampler for the new size.");
  set_state(state());
}

std::size_t DistributedSampler::size() const { return static_cast<std::size_t>(stream_->size); }
std::int64_t DistributedSampler::position() const { return stream_->position; }
std::int64_t DistributedSampler::epoch() const { return stream_->epoch; }

DistributedSampler::State DistributedSampler::state() const {
  const Stream& s = *stream_;
  return {.position = s.position,
          .epoch = s.epoch + (s.phase == Stream::Phase::ENDED ? 1 : 0),
          .size = s.size,
          .seed = s.options.seed,
          .shuffle = s.options.shuffle};
}

void DistributedSampler::set_state(const State& state) {
  Stream& s = *stream_;
  TORCH_CHECK(state.size == s.size, "DistributedSampler: expected a state for ", s.size, " samples, as this sampler has, got one for ",
              state.size, ". Go on with the dataset that the state was taken with, or begin anew without it.");
  TORCH_CHECK(state.shuffle == s.options.shuffle, "DistributedSampler: expected a state taken with ", shuffle_name(s.options.shuffle),
              ", as this sampler has, got one with ", shuffle_name(state.shuffle),
              ". Make the sampler with the state's setting, or begin anew without it.");
  TORCH_CHECK(state.seed == s.options.seed || !state.shuffle, "DistributedSampler: expected a state taken with seed ", s.options.seed,
              ", as this sampler has, got one with seed ", state.seed,
              ". Make the sampler with the state's seed, or begin anew without it.");
  TORCH_CHECK(state.position >= 0 && state.position < kLargest - s.size && state.epoch >= 0 && state.epoch < kLargest,
              "DistributedSampler: expected a position from 0 to ", kLargest - s.size - 1, " and an epoch of at least 0, got position ",
              state.position, " and epoch ", state.epoch, ". The state is damaged: take an earlier one.");
  s.position = state.position;
  s.epoch = state.epoch;
  s.phase = Stream::Phase::FRESH;
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const State s = state();
  archive.write("position", c10::IValue(s.position));
  archive.write("epoch", c10::IValue(s.epoch));
  archive.write("size", c10::IValue(s.size));
  archive.write("seed", c10::IValue(static_cast<std::int64_t>(s.seed)));
  archive.write("shuffle", c10::IValue(s.shuffle));
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&](const char* key, auto is_type) {
    c10::IValue value;
    TORCH_CHECK(archive.try_read(key, value) && is_type(value),
                "DistributedSampler::load: expected an archive that DistributedSampler::save wrote, got one without '", key,
                "'. Read the same archive, or the same key of it, that was written.");
    return value;
  };
  const auto integer = [&](const char* key) { return read(key, [](const c10::IValue& v) { return v.isInt(); }).toInt(); };
  const auto flag = [&](const char* key) { return read(key, [](const c10::IValue& v) { return v.isBool(); }).toBool(); };
  set_state({.position = integer("position"),
             .epoch = integer("epoch"),
             .size = integer("size"),
             .seed = static_cast<std::uint64_t>(integer("seed")),
             .shuffle = flag("shuffle")});
}

}  // namespace fsdp
