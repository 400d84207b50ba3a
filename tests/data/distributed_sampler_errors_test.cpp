#include "data/stream.h"
#include "support/ranks.h"

#include <torch/serialize.h>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <limits>
#include <sstream>

using Catch::Matchers::ContainsSubstring;
using fsdp::DistributedSampler;
using fsdp::testing::error_of;
using fsdp::testing::Indices;

TEST_CASE("a sampler refuses a world that cannot be", "[data][quick]") {
  CHECK_THAT(error_of([] { DistributedSampler(0, 0, 1); }), ContainsSubstring("samples, got 0. Check that the dataset was loaded"));
  CHECK_THAT(error_of([] { DistributedSampler(10, 0, 0); }), ContainsSubstring("expected a world size of at least 1, got 0"));
  CHECK_THAT(error_of([] { DistributedSampler(10, 2, 2); }),
             ContainsSubstring("expected a rank from 0 to 1 at world size 2, got 2. The order is (size, rank, world_size)"));
  CHECK_THAT(error_of([] { DistributedSampler(10, -1, 2); }), ContainsSubstring("got -1"));
}

TEST_CASE("a sampler refuses requests that mean nothing, and goes on", "[data][quick]") {
  DistributedSampler sampler(10, 0, 2, {.shuffle = false});
  CHECK_THAT(error_of([&] { sampler.next(0); }),
             ContainsSubstring("expected a batch of at least 1 sample per rank, got 0. Give the loader a batch_size."));
  CHECK_THAT(error_of([&] { sampler.next(std::numeric_limits<std::size_t>::max()); }), ContainsSubstring("Give a smaller batch_size."));
  CHECK_THAT(error_of([&] { sampler.reset(11); }), ContainsSubstring("expected the size that the sampler was made with, 10, got 11. "));
  sampler.reset(10);
  CHECK(*sampler.next(2) == Indices{0, 1});
}

TEST_CASE("a sampler refuses a state of another stream, and keeps its own", "[data][quick]") {
  DistributedSampler sampler(10, 0, 1, {.seed = 3});
  sampler.next(4);
  const auto before = sampler.state();
  const auto with = [&](auto change) {
    auto state = before;
    change(state);
    return error_of([&] { sampler.set_state(state); });
  };
  CHECK_THAT(with([](auto& s) { s.size = 11; }),
             ContainsSubstring("expected a state for 10 samples, as this sampler has, got one for 11. "));
  CHECK_THAT(with([](auto& s) { s.seed = 4; }),
             ContainsSubstring(
                 "expected a state taken with seed 3, as this sampler has, got one with seed 4. Make the sampler with the state's seed"));
  CHECK_THAT(with([](auto& s) { s.shuffle = false; }),
             ContainsSubstring("expected a state taken with shuffle = true, as this sampler has, got one with shuffle = false"));
  CHECK_THAT(with([](auto& s) { s.position = -1; }), ContainsSubstring("got position -1 and epoch 0. The state is damaged"));
  CHECK_THAT(with([](auto& s) { s.epoch = -1; }), ContainsSubstring("got position 4 and epoch -1"));
  CHECK(sampler.state() == before);

  std::stringstream file;
  torch::serialize::OutputArchive other;
  other.write("position", c10::IValue(std::int64_t{4}));
  other.write("epoch", torch::zeros({1}));
  other.save_to(file);
  torch::serialize::InputArchive in;
  in.load_from(file);
  CHECK_THAT(error_of([&] { sampler.load(in); }),
             ContainsSubstring("expected an archive that DistributedSampler::save wrote, got one without 'epoch'"));
  CHECK(sampler.state() == before);
}
