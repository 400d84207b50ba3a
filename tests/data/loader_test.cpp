// The sampler inside LibTorch's own loader, which resets it before each loop and, with workers, reads ahead.
#include "data/stream.h"

#include <torch/data.h>

using fsdp::DistributedSampler;
using fsdp::testing::append;
using fsdp::testing::Indices;
using fsdp::testing::stream;

namespace {

// Sample i is the number i.
struct Numbers : torch::data::datasets::BatchDataset<Numbers, Indices> {
  explicit Numbers(std::size_t size) : size_(size) {}
  Indices get_batch(c10::ArrayRef<std::size_t> indices) override { return indices.vec(); }
  std::optional<std::size_t> size() const override { return size_; }
  std::size_t size_;
};

auto loader_of(std::size_t size, const DistributedSampler& sampler, std::size_t batch, std::size_t workers = 0) {
  return torch::data::make_data_loader(Numbers(size), sampler, torch::data::DataLoaderOptions(batch).workers(workers));
}

Indices slice(const Indices& all, std::size_t begin, std::size_t end) { return {all.begin() + begin, all.begin() + end}; }

}  // namespace

TEST_CASE("a loader goes through the stream, loop by loop", "[data][quick]") {
  const auto expected = stream(23, 92);
  for (const std::size_t workers : {0, 2}) {
    INFO(workers << " workers");
    DistributedSampler sampler(23, 0, 1);
    const auto loader = loader_of(23, sampler, 4, workers);
    Indices all;
    for (int epoch = 0; epoch < 4; ++epoch) {
      for (auto& batch : *loader) {
        append(all, batch);
        CHECK(sampler.epoch() == epoch);
      }
      CHECK(sampler.position() == static_cast<std::int64_t>(all.size()));
    }
    CHECK(all == expected);  // 92 = 4 · 23: nothing waits
  }
}

TEST_CASE("a loader without workers stands exactly where its loop stands", "[data][quick]") {
  const auto expected = stream(23, 46);
  DistributedSampler sampler(23, 0, 1);
  const auto loader = loader_of(23, sampler, 4);
  Indices all;
  for (auto& batch : *loader) {
    append(all, batch);
    CHECK(sampler.position() == static_cast<std::int64_t>(all.size()));
    if (all.size() == 8) break;
  }
  for (auto& batch : *loader) append(all, batch);
  CHECK(all == slice(expected, 0, 20));

  const auto state = sampler.state();  // and a new run, at the end of an epoch
  DistributedSampler resumed(23, 0, 1);
  resumed.set_state(state);
  const auto another_loader = loader_of(23, resumed, 4);
  for (auto& batch : *another_loader) append(all, batch);
  CHECK(all == slice(expected, 0, 44));
}

TEST_CASE("with workers, the state before the loop and the steps done say where to go on", "[data][quick]") {
  const auto expected = stream(23, 92);
  for (const int done : {1, 3, 5}) {  // of 5 steps; epoch 1, opened by epoch 0's tail of 3, has 6
    Indices all;
    DistributedSampler::State state;
    {
      DistributedSampler sampler(23, 0, 1);
      const auto loader = loader_of(23, sampler, 4, 2);
      for (auto& batch : *loader) append(all, batch);
      state = sampler.state();
      int steps = 0;
      for (auto& batch : *loader) {
        append(all, batch);
        state.position += 4;
        CHECK(sampler.position() >= state.position);  // read ahead
        if (++steps == done) break;
      }
    }
    DistributedSampler resumed(23, 0, 1);
    resumed.set_state(state);
    const auto loader = loader_of(23, resumed, 4, 2);
    for (int loop = 0; loop < 2; ++loop) {
      for (auto& batch : *loader) append(all, batch);
    }
    CHECK(all == slice(expected, 0, 68));
  }
}
