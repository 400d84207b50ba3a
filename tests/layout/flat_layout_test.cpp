#include "layout/flat_layout.h"

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include <numeric>
#include <vector>

using fsdp::FlatLayout;

namespace {

const std::vector<std::vector<int64_t>> kGroups{{}, {0}, {1}, {1, 2, 3, 0, 5}, {0, 7}, {64, 64}, {1000, 3, 0, 0, 17, 129}, {5}};

}  // namespace

TEST_CASE("every element of a group lies on exactly one rank, at any world size", "[layout][quick]") {
  for (const auto& numels : kGroups)
    for (int world_size : {1, 2, 3, 4, 5, 6, 8}) {
      const FlatLayout layout(numels, 4, world_size);
      for (int64_t p = 0; p < layout.parameters(); ++p) {
        int64_t next = 0;
        for (int rank = 0; rank < world_size; ++rank) {
          const auto slice = layout.slice(p, rank);
          REQUIRE(slice.begin_in_shard >= 0);
          REQUIRE(slice.begin_in_shard + slice.length <= layout.shard_numel());
          if (!slice.length) continue;
          CHECK(slice.begin_in_parameter == next);
          CHECK(rank * layout.shard_numel() + slice.begin_in_shard == layout.offset(p) + slice.begin_in_parameter);
          next += slice.length;
        }
        CHECK(next == layout.numel(p));
      }
    }
}

TEST_CASE("offsets and per-rank lengths are multiples of the alignment", "[layout][quick]") {
  for (const auto& numels : kGroups)
    for (int world_size : {1, 2, 3, 5, 6})
      for (int64_t alignment : {1, 4, 8, 16}) {
        const FlatLayout layout(numels, alignment, world_size);
        CHECK(layout.shard_numel() % alignment == 0);
        CHECK(layout.counts_numel() % alignment == 0);
        CHECK(layout.counts_numel() >= layout.parameters());
        for (int64_t p = 0; p < layout.parameters(); ++p) CHECK(layout.offset(p) % alignment == 0);
      }
}

TEST_CASE("padding stays below one alignment per parameter and rank", "[layout][quick]") {
  const FlatLayout layout({1000, 3, 0, 17, 129}, 4, 6);
  const int64_t elements = 1000 + 3 + 17 + 129;
  CHECK(layout.unsharded_numel() >= elements);
  CHECK(layout.unsharded_numel() < elements + 4 * 5 + 6 * 4);
}

TEST_CASE("gradient runs cover a parameter once and keep clear of the counts", "[layout][quick]") {
  for (const auto& numels : kGroups)
    for (int world_size : {1, 2, 3, 5}) {
      const FlatLayout layout(numels, 4, world_size);
      std::vector<int> used(layout.gradient_numel(), 0);
      for (int64_t p = 0; p < layout.parameters(); ++p) {
        int64_t next = 0;
        for (const auto& run : layout.gradient_runs(p)) {
          CHECK(run.begin_in_parameter == next);
          next += run.length;
          for (int64_t i = 0; i < run.length; ++i) {
            const int64_t at = run.begin_in_gradient + i;
            CHECK(++used[at] == 1);
            CHECK(at % layout.gradient_shard_numel() < layout.shard_numel());
          }
        }
        CHECK(next == layout.numel(p));
      }
    }
}

TEST_CASE("16 bytes in the narrowest dtype decide the alignment", "[layout][quick]") {
  CHECK(fsdp::alignment_in_elements({4}) == 4);
  CHECK(fsdp::alignment_in_elements({4, 2}) == 8);
  CHECK(fsdp::alignment_in_elements({1}) == 16);
  CHECK(fsdp::alignment_in_elements({16}) == 1);
}

TEST_CASE("impossible layouts are refused", "[layout][quick]") {
  using Catch::Matchers::ContainsSubstring;
  CHECK_THROWS_WITH(FlatLayout({1}, 4, 0), ContainsSubstring("world size must be at least 1, got 0"));
  CHECK_THROWS_WITH(FlatLayout({3, -1}, 4, 2), ContainsSubstring("cannot have -1 elements"));
  CHECK_THROWS_WITH(FlatLayout({int64_t{1} << 61, int64_t{1} << 62}, 4, 2), ContainsSubstring("more than 2^62"));
}
