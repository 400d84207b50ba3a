// Small values over the ranks, and failures of one that all learn of.
#include <fsdp/exchange.h>

#include "support/expect_contains.h"

namespace {

using fsdp::testing::error_of;
using fsdp::testing::expect_contains;

}  // namespace

RANKS_TEST("sum_over_ranks adds element by element", "[comm][quick]", 1, 2, 3) {
  const double rank = group.rank(), n = group.world_size();
  const auto sums = fsdp::sum_over_ranks(group, {rank, 1, 0.5 * rank});
  EXPECT((sums == std::vector<double>{n * (n - 1) / 2, n, n * (n - 1) / 4}), "got " << sums[0] << ", " << sums[1] << ", " << sums[2]);
  EXPECT(fsdp::sum_over_ranks(group, {}).empty(), "nothing adds up to nothing");
}

RANKS_TEST("run_on_all: what fails on one rank fails on all, and the group goes on", "[comm][quick]", 1, 2, 3) {
  const int failing = group.world_size() - 1;
  const auto error =
      error_of([&] { fsdp::run_on_all(group, "reading data", [&] { TORCH_CHECK(group.rank() != failing, "the disk is gone"); }); });
  expect_contains(error, {"the disk is gone"});
  if (group.rank() != failing) expect_contains(error, {"reading data: rank " + std::to_string(failing)});

  int runs = 0;
  fsdp::run_on_all(group, "reading data", [&] { ++runs; });
  EXPECT(runs == 1, "ran " << runs << " times");
}
