// Errors of the seam: wrong arguments, groups that failed, ranks that are not where the others are.
#include "comm/collectives.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

#include <torch/torch.h>

namespace {

using namespace std::chrono_literals;
using fsdp::testing::error_of;

void expect_text(const std::string& error, const std::vector<std::string>& expected) {
  for (const auto& text : expected) EXPECT(error.find(text) != std::string::npos, "'" << text << "' in: " << error);
}

// A group of the same ranks that a test may ruin.
fsdp::ProcessGroup another_group() { return fsdp::init_process_group({.timeout = 20s, .rendezvous_timeout = 20s}); }

std::string rank_of(const fsdp::ProcessGroup& group) {
  return "rank " + std::to_string(group.rank()) + " of " + std::to_string(group.world_size());
}

}  // namespace

RANKS_TEST("wrong arguments are named and leave the group as it was", "[comm][quick]", 1, 2, 3) {
  auto& seam = *group.collectives();
  const int64_t n = group.world_size();
  const std::string here = "on rank " + std::to_string(group.rank());
  expect_text(error_of([&] { seam.all_gather({}, torch::ones({2}), "x"); }), {"all_gather: `output` is undefined", here});
  expect_text(error_of([&] { seam.all_gather(torch::ones({2 * n}), {}, "x"); }), {"all_gather: `input` is undefined", here});
  expect_text(
      error_of([&] { seam.all_gather(torch::ones({2 * n + 1}), torch::ones({2}), "x"); }),
      {"all_gather: `output` must have " + std::to_string(n) + " times the 2 elements of `input`, but has " + std::to_string(2 * n + 1)});
  expect_text(error_of([&] { seam.all_gather(torch::ones({2 * n}), torch::ones({2}, at::kInt), "x"); }),
              {"all_gather: `output` is Float but `input` is Int"});
  expect_text(error_of([&] { seam.reduce_scatter(torch::ones({3}), torch::ones({2 * n}), "x"); }),
              {"reduce_scatter: `input` must have", "of `output`"});
  expect_text(error_of([&] { seam.all_reduce(torch::ones({2, 3}), "x"); }), {"all_reduce: `tensor` must be 1-D and contiguous", "[2, 3]"});
  expect_text(error_of([&] { seam.all_reduce(torch::ones({8}).slice(0, 0, 8, 2), "x"); }), {"must be 1-D and contiguous", "strides [2]"});
  expect_text(error_of([&] { seam.broadcast(torch::ones({2}), static_cast<int>(n), "x"); }),
              {"broadcast: root " + std::to_string(n) + " is not a rank of a group of " + std::to_string(n)});
  fsdp::comm::Pending nothing;
  expect_text(error_of([&] { nothing.wait(); }), {"holds no operation"});
  group.barrier();
}

RANKS_TEST("a group that failed once stays failed, and says with what", "[comm][quick]", 2, 3) {
  auto other = another_group();
  // Rank 1 leaves; the others find out in their next operation, and after that without any.
  if (other.rank() == 1) {
    other.close();
    return;
  }
  const auto gather = [&] {
    auto output = torch::empty({100 * other.world_size()});
    other.collectives()->all_gather(output, torch::ones({100}), "unit 'blocks.1', forward").wait();
  };
  const std::string first = error_of(gather);
  expect_text(first, {rank_of(other) + ": all_gather (unit 'blocks.1', forward) failed after "});
  EXPECT(other.collectives()->first_error() == first, other.collectives()->first_error());
  const auto started = std::chrono::steady_clock::now();
  expect_text(error_of([&] { other.barrier(); }), {rank_of(other) + ": barrier refused, since the group has failed before: " + first});
  expect_text(error_of(gather), {"all_gather (unit 'blocks.1', forward) refused", first});
  expect_text(error_of([&] { other.collectives()->exchange("plan", "mine"); }), {"exchange (plan) refused", first});
  EXPECT(std::chrono::steady_clock::now() - started < 500ms, "refusing took long");
}

RANKS_TEST("different dtypes are an error on all ranks that names both", "[comm][quick]", 2, 3, 4) {
  auto other = another_group();
  const auto started = std::chrono::steady_clock::now();
  const auto type = other.rank() == 1 ? at::kInt : at::kFloat;  // Gloo would add up their bytes
  const std::string error = error_of([&] { other.collectives()->all_reduce(torch::ones({5}).to(type), "gradient norm").wait(); });
  expect_text(error, {rank_of(other) + ": all_reduce (gradient norm) failed after", "rank 1: all_reduce (gradient norm), 5 elements of Int",
                      "5 elements of Float"});
  EXPECT(std::chrono::steady_clock::now() - started < 5s, "it took long: " << error);
}

RANKS_TEST("an exchange on different topics is an error on all ranks that names both", "[comm][quick]", 2, 3) {
  auto other = another_group();
  const bool odd = other.rank() == 1;
  const std::string error = error_of([&] { other.collectives()->exchange(odd ? "plan" : "clip_grad_norm", "text"); });
  expect_text(error,
              {rank_of(other) + ": exchange (", "the ranks do different things", "exchange (plan)", "exchange (clip_grad_norm)", "rank 1"});
}

RANKS_TEST("a group may be dropped while operations are in flight", "[comm][quick]", 2, 3) {
  const auto started = std::chrono::steady_clock::now();
  auto sum = torch::ones({100'000});
  {
    auto other = another_group();
    auto dropped = other.collectives()->all_reduce(sum, "dropped");
  }
  EXPECT(std::chrono::steady_clock::now() - started < 5s, "leaving took long");
}
