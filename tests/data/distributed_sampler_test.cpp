#include "data/stream.h"

#include <torch/serialize.h>

#include <algorithm>
#include <sstream>

using fsdp::DistributedSampler;
using fsdp::testing::append;
using fsdp::testing::Indices;
using fsdp::testing::Run;
using fsdp::testing::stream;

TEST_CASE("every world size and batch reads the same stream of whole permutations", "[data][quick]") {
  for (const std::size_t size : {1, 7, 20, 23, 97}) {
    const auto expected = stream(size, 8 * size, {.seed = 5});
    for (std::size_t permutation = 0; permutation < 8; ++permutation) {
      Indices sorted(expected.begin() + permutation * size, expected.begin() + (permutation + 1) * size);
      std::sort(sorted.begin(), sorted.end());
      for (std::size_t i = 0; i < size; ++i) REQUIRE(sorted[i] == i);
    }
    for (int world_size = 1; world_size <= 6; ++world_size) {
      for (const std::size_t batch : {1, 2, 5}) {
        const auto step = world_size * batch;
        if (step > size) continue;  // a test of its own below
        INFO("size " << size << ", world size " << world_size << ", batch " << batch);
        Run run(size, world_size, {.seed = 5});
        Indices all;
        for (std::size_t epoch = 0; epoch < 6; ++epoch) {
          append(all, run.loop(batch));
          // The epoch took all it could, the rest waits for the next one.
          const auto rest = (epoch + 1) * size - all.size();
          CHECK(rest < step);
          CHECK(run.ranks[0].epoch() == static_cast<std::int64_t>(epoch));
          CHECK(run.ranks[0].position() == static_cast<std::int64_t>(all.size()));
        }
        CHECK(all == Indices(expected.begin(), expected.begin() + all.size()));
      }
    }
  }
}

TEST_CASE("rank r has the r-th block of a step, and the tail opens the next epoch", "[data][quick]") {
  // 10 samples in order, steps of 3 · 2: the first epoch has room for one, its last 4 open the second, which has room for two.
  Run run(10, 3, {.shuffle = false});
  CHECK(*run.ranks[0].next(2) == Indices{0, 1});
  CHECK(*run.ranks[1].next(2) == Indices{2, 3});
  CHECK(*run.ranks[2].next(2) == Indices{4, 5});
  CHECK_FALSE(run.step(2));
  CHECK_FALSE(run.step(2));  // until reset(), whoever asks, for whatever batch: loaders with workers do
  CHECK_FALSE(run.step(1));
  CHECK(run.loop(2) == Indices{6, 7, 8, 9, 0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(run.loop(2) == Indices{8, 9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9});
}

TEST_CASE("a dataset smaller than a step is read several times per step", "[data][quick]") {
  const auto expected = stream(5, 200);
  Run run(5, 4);
  Indices all;
  for (int loop = 0; loop < 10; ++loop) {
    const auto part = run.loop(3);
    CHECK(part.size() == 12);  // no loop is empty
    append(all, part);
  }
  CHECK(all == Indices(expected.begin(), expected.begin() + all.size()));
}

TEST_CASE("a loop left early goes on where it stopped", "[data][quick]") {
  const auto expected = stream(23, 69);
  Run run(23, 2);
  CHECK(run.loop(3, 2) == Indices(expected.begin(), expected.begin() + 12));
  CHECK(run.loop(3) == Indices(expected.begin() + 12, expected.begin() + 18));
  CHECK(run.ranks[0].epoch() == 0);
  // Left after its last step, before it could say that it is over: the next loop is a full one, not an empty one.
  CHECK(run.loop(3, 4) == Indices(expected.begin() + 18, expected.begin() + 42));
  CHECK(run.ranks[0].epoch() == 1);
  CHECK(run.loop(3) == Indices(expected.begin() + 42, expected.begin() + 66));
  CHECK(run.ranks[0].epoch() == 2);
}

TEST_CASE("a run goes on at another world size and batch", "[data][quick]") {
  const std::size_t size = 41;
  const auto expected = stream(size, 6 * size, {.seed = 9});
  for (const auto& [world_size, batch] : {std::pair{1, 5}, {2, 3}, {3, 4}, {6, 1}}) {
    for (const auto& [next_world_size, next_batch] : {std::pair{1, 1}, {2, 7}, {5, 2}}) {
      for (const int steps : {0, 1, 3, -1}) {  // -1: the whole epoch
        INFO("from " << world_size << " · " << batch << " to " << next_world_size << " · " << next_batch << " after " << steps
                     << " steps of epoch 1");
        Run before(size, world_size, {.seed = 9});
        Indices all = before.loop(batch);
        append(all, before.loop(batch, steps));

        std::stringstream file;  // rank 0's is enough for all
        torch::serialize::OutputArchive out;
        before.ranks[0].save(out);
        out.save_to(file);

        Run after(size, next_world_size, {.seed = 9});
        for (auto& sampler : after.ranks) {
          file.seekg(0);
          torch::serialize::InputArchive in;
          in.load_from(file);
          sampler.load(in);
          CHECK(sampler.state() == before.ranks[0].state());
        }
        const auto rest = after.loop(next_batch);
        CHECK_FALSE(rest.empty());
        append(all, rest);
        const std::int64_t ended = steps == -1 ? 2 : 1;
        CHECK(after.ranks[0].epoch() >= ended);  // ended epochs stay ended, though a smaller step would still fit
        append(all, after.loop(next_batch));
        CHECK(all == Indices(expected.begin(), expected.begin() + all.size()));
      }
    }
  }
}

TEST_CASE("copies of a sampler are handles to one stream", "[data][quick]") {
  DistributedSampler sampler(10, 0, 1, {.shuffle = false});
  DistributedSampler copy = sampler;
  DistributedSampler moved = std::move(copy);
  CHECK(*moved.next(2) == Indices{0, 1});
  CHECK(sampler.position() == 2);
  CHECK(*copy.next(2) == Indices{2, 3});
}

TEST_CASE("a sampler takes rank and world size from a group", "[data][quick]") {
  struct Group {
    int rank() const { return 1; }
    int world_size() const { return 2; }
  };
  DistributedSampler sampler(10, Group{}, {.shuffle = false});
  CHECK(*sampler.next(3) == Indices{3, 4, 5});
}
