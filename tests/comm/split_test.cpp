// Parts of a group: who is in which, that each works by itself, and what their errors say.
#include "comm/collectives.h"
#include "support/models.h"
#include "support/parity.h"

#include <signal.h>

#include <atomic>
#include <exception>
#include <optional>
#include <thread>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::ProcessGroup;
using fsdp::testing::error_of;
using fsdp::testing::kWithoutGroup;
using fsdp::testing::MlpImpl;
using fsdp::testing::run_in_own_processes;

// The ranks of the whole that are in this part, by its own order.
std::vector<int64_t> members(ProcessGroup& part, int rank_in_whole) {
  auto all = torch::empty({part.world_size()}, at::kLong);
  part.collectives()->all_gather(all, torch::full({1}, rank_in_whole, at::kLong), "who is here").wait();
  return {all.data_ptr<int64_t>(), all.data_ptr<int64_t>() + all.numel()};
}

void expect_members(ProcessGroup& part, int rank_in_whole, const std::vector<int64_t>& expected) {
  const auto found = members(part, rank_in_whole);
  EXPECT(found == expected, "rank " << rank_in_whole << " is in a part of " << torch::tensor(found));
  EXPECT(found[part.rank()] == rank_in_whole, "rank " << rank_in_whole << " is rank " << part.rank() << " of its part");
}

// Draws no random numbers, whose generator threads would share.
std::shared_ptr<MlpImpl> make_model() {
  const torch::NoGradGuard no_grad;
  auto model = std::make_shared<MlpImpl>();
  double from = 1;
  for (auto& p : model->parameters()) p.copy_(torch::sin(torch::arange(p.numel()) + from++).reshape(p.sizes()) / 3);
  return model;
}

// `seed` makes a run of its own: other batches, so other numbers.
void check_training(ProcessGroup& group, int seed, int steps = 4) {
  fsdp::testing::check_parity<MlpImpl>(
      group, make_model,
      [seed](int rank, int step) {
        return torch::sin(torch::arange(24).reshape({4, 6}) + 1000 * seed + 100 * rank + 10 * step);
      },
      [](MlpImpl& model, const torch::Tensor& x) { return model.forward(x).square().mean(); },
      {.fsdp = {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(50)}, .steps = steps});
}

}  // namespace

RANKS_TEST("split orders the ranks of a color by key and then by rank", "[comm][quick]", 1, 2, 3, 4) {
  const int rank = group.rank(), world_size = group.world_size();
  std::vector<int64_t> all, reversed, mine;
  for (int r = 0; r < world_size; ++r) {
    all.push_back(r);
    reversed.insert(reversed.begin(), r);
    if (r % 2 == rank % 2) mine.push_back(r);
  }
  auto same = group.split(5);
  expect_members(*same, rank, all);
  auto turned = group.split(0, -rank);
  expect_members(*turned, rank, reversed);
  auto parity = group.split(rank % 2);
  expect_members(*parity, rank, mine);
  const auto nobody = group.split(-1);
  EXPECT(!nobody, "a negative color gave a group");
  auto last = group.split(rank == world_size - 1 ? 3 : -2);
  EXPECT(last.has_value() == (rank == world_size - 1), "rank " << rank << " is in the wrong part");
  if (last) EXPECT(last->rank() == 0 && last->world_size() == 1, "rank " << last->rank() << " of " << last->world_size());

  // Parts of parts; the whole works on, and parts beside it.
  auto nested = turned->split(turned->rank() % 2);
  std::vector<int64_t> expected;
  for (int r = world_size - 1; r >= 0; --r)
    if ((world_size - 1 - r) % 2 == turned->rank() % 2) expected.push_back(r);
  expect_members(*nested, rank, expected);
  expect_members(group, rank, all);
  expect_members(*parity, rank, mine);
}

RANKS_TEST("two halves train, each for itself", "[comm]", 4) {
  auto half = group.split(group.rank() / 2);
  EXPECT(half->world_size() == 2, "a half of " << half->world_size());
  check_training(*half, group.rank() / 2);
}

RANKS_TEST("halves work at their own pace, and outlive the whole", "[comm][quick]", 4) {
  auto whole = group.split(0);
  const int half_number = group.rank() / 2;
  auto half = whole->split(half_number);
  whole->close();
  whole.reset();
  // One half has left before the other begins.
  if (half_number == 0) {
    expect_members(*half, group.rank(), {0, 1});
    half->close();
  }
  group.barrier();
  if (half_number == 1) {
    std::this_thread::sleep_for(1500ms);  // longer than the grace that a lost store has
    for (int i = 0; i < 20; ++i) expect_members(*half, group.rank(), {2, 3});
    half->collectives()->exchange("a topic", "a text");
  }
}

RANKS_TEST("two models train in two threads, on a group each", "[comm]", 1, 2, 3) {
  auto first = group.split(0), second = group.split(0);
  std::exception_ptr error;
  std::thread other([&] {
    try {
      check_training(*second, 2, 12);
    } catch (...) {
      error = std::current_exception();
    }
  });
  std::exception_ptr own_error;
  try {
    check_training(*first, 1, 12);
  } catch (...) {
    own_error = std::current_exception();
  }
  other.join();
  if (own_error) std::rethrow_exception(own_error);
  if (error) std::rethrow_exception(error);
}

// LibTorch notes every group's first operation in a map of the process that it does not guard. Without our guard four of four such runs
// crashed.
RANKS_TEST("groups begin their first operations in two threads at once", "[comm]", 2) {
  std::vector<std::optional<fsdp::ProcessGroup>> parts;
  for (int i = 0; i < 40; ++i) parts.push_back(group.split(0));
  std::atomic<int> ready = 0;
  const auto begin_every_second = [&](size_t first) {
    for (size_t i = first; i < parts.size(); i += 2) {
      ++ready;
      while (ready < static_cast<int>(i / 2 + 1) * 2) {
      }
      parts[i]->barrier();
    }
  };
  std::thread other([&] { begin_every_second(1); });
  begin_every_second(0);
  other.join();
}

RANK_BODY("a rank of a part dies") {
  auto half = group.split(group.rank() % 2);
  if (group.rank() == 3) raise(SIGKILL);
  if (group.rank() % 2 == 0) {  // the other half does not even notice
    for (int i = 0; i < 30; ++i) {
      expect_members(*half, group.rank(), {0, 2});
      std::this_thread::sleep_for(50ms);
    }
    return;
  }
  throw std::runtime_error(error_of([&] {
    while (true) half->barrier();
  }));
}

TEST_CASE("an error in a part names the part, and the ranks before the split", "[comm]") {
  for (const auto& result : run_in_own_processes(4, "a rank of a part dies")) {
    INFO("rank " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK_FALSE(result.killed_by_limit);
    if (result.rank == 3) continue;
    CHECK(result.exit_code == result.rank % 2);
    if (result.rank != 1) continue;
    CHECK_THAT(result.message, ContainsSubstring("rank 0 of 2 in group 'color 1' (rank 1 of 4 before the split): barrier failed"));
    CHECK_THAT(result.message, ContainsSubstring("gone: rank 1 (rank 3 of 4 before the split, host"));
  }
}

RANK_BODY("a rank does not split") {
  auto other = fsdp::init_process_group({.timeout = 1s, .rendezvous_timeout = 20s});
  if (other.rank() == 1) {
    std::this_thread::sleep_for(2500ms);
    return;
  }
  throw std::runtime_error(error_of([&] { other.split(0); }));
}

TEST_CASE("a rank that does not split is waited for until the timeout", "[comm]") {
  const auto results = run_in_own_processes(2, "a rank does not split", 60s, {{kWithoutGroup, "1"}});
  CHECK_THAT(results[0].message, ContainsSubstring("rank 0 of 2: exchange (split) failed after 1."));
}
