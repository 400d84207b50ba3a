#include "data/permutation.h"

#include <catch2/catch_test_macros.hpp>

#include <map>

namespace {

std::vector<std::size_t> permutation(std::size_t size, std::uint64_t seed, std::uint64_t number) {
  std::vector<std::size_t> out(size);
  fsdp::data::permute(seed, number, out);
  return out;
}

}  // namespace

// Resumed runs rely on these staying as they are: a change here changes what every saved position means. The values come from
// golden_permutations.py, a second implementation.
TEST_CASE("permutations have known values", "[data][quick]") {
  using Values = std::vector<std::size_t>;
  CHECK(permutation(10, 0x0, 0x0) == Values{8, 2, 3, 5, 1, 6, 9, 7, 0, 4});
  CHECK(permutation(10, 0x0, 0x1) == Values{1, 7, 2, 0, 6, 9, 3, 4, 5, 8});
  CHECK(permutation(10, 0x7, 0x0) == Values{9, 2, 7, 4, 8, 3, 6, 5, 0, 1});
  CHECK(permutation(10, 0xfedcba9876543210, 0x123456789) == Values{6, 4, 8, 0, 9, 2, 5, 3, 1, 7});
}

TEST_CASE("every half of seed and number counts", "[data][quick]") {
  const auto base = permutation(50, 1, 1);
  for (const std::uint64_t bit : {1, 31, 32, 63}) {
    CHECK(permutation(50, 1 ^ (std::uint64_t{1} << bit), 1) != base);
    CHECK(permutation(50, 1, 1 ^ (std::uint64_t{1} << bit)) != base);
  }
  CHECK(permutation(50, 0, 1) != permutation(50, 1, 0));
}

TEST_CASE("all permutations are equally likely", "[data][quick]") {
  // 24 permutations of 4, 24,000 draws: each count is 1,000 with a deviation of 31; the draws are fixed, so is the outcome.
  std::map<std::vector<std::size_t>, int> counts;
  for (std::uint64_t number = 0; number < 24'000; ++number) {
    ++counts[permutation(4, 3, number)];
  }
  CHECK(counts.size() == 24);
  for (const auto& [_, count] : counts) {
    CHECK(count > 875);
    CHECK(count < 1125);
  }
}

TEST_CASE("the smallest permutations", "[data][quick]") {
  CHECK(permutation(0, 1, 1).empty());
  CHECK(permutation(1, 1, 1) == std::vector<std::size_t>{0});
}
