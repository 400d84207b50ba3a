// Ranks that cannot form a group: who finds out, when, and what they are told.
#include "comm/handshake.h"
#include "comm/rendezvous.h"
#include "support/environment_scope.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

#include <unistd.h>

#include <thread>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::comm::contradiction;
using fsdp::comm::Member;
using fsdp::testing::error_of;
using fsdp::testing::kWithoutGroup;
using fsdp::testing::RankResult;
using fsdp::testing::run_in_own_processes;

using Clock = std::chrono::steady_clock;

Member member(int rank, int world_size, int64_t pid) {
  return {.world_size = world_size,
          .library_version = "1.0.0",
          .torch_version = "2.11.0",
          .backend = "gloo",
          .rank = rank,
          .host = "h",
          .loopback = "l",
          .pid = pid};
}

// In a rank without a group: the place that the launcher gave it, replaced by another one.
int launched_as() { return std::atoi(std::getenv("RANK")); }
void pretend(int rank, int world_size) {
  setenv("RANK", std::to_string(rank).c_str(), 1);
  setenv("LOCAL_RANK", "0", 1);
  setenv("WORLD_SIZE", std::to_string(world_size).c_str(), 1);
}

// Joins, and works until `until`: a contradiction may come when the group has just been formed, and ends it then.
void join_and_work(std::chrono::milliseconds rendezvous_timeout, Clock::time_point until) {
  fsdp::ProcessGroup group = fsdp::init_process_group({.timeout = 10s, .rendezvous_timeout = rendezvous_timeout});
  while (Clock::now() < until) {
    group.barrier();
    std::this_thread::sleep_for(20ms);
  }
}

void throw_if_late(Clock::time_point since, std::chrono::milliseconds limit, const std::string& error) {
  EXPECT(Clock::now() - since < limit, "the error came after " << (Clock::now() - since) / 1ms << " ms: " << error);
}

// All ranks must fail within five seconds of the last arrival, with every one of `expected` in the text.
void check_all_fail(int processes, const char* body, const std::vector<std::string>& expected) {
  const auto results = run_in_own_processes(processes, body, 60s, {{kWithoutGroup, "1"}});
  for (const RankResult& result : results) {
    INFO("process " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK(result.exited);
    CHECK(result.exit_code == 1);
    for (const auto& text : expected) CHECK_THAT(result.message, ContainsSubstring(text));
    CHECK_THAT(result.message, !ContainsSubstring("expected"));  // an EXPECT of the body
  }
}

// What each of these bodies does: take the wrong place, join, and throw what came of it unless it came too late.
void fail_in_time(std::chrono::milliseconds rendezvous_timeout = 20s, std::chrono::milliseconds limit = 5s) {
  const auto started = Clock::now();
  const std::string error = error_of([&] { join_and_work(rendezvous_timeout, started + limit); });
  throw_if_late(started, limit, error);
  throw std::runtime_error(error);
}

}  // namespace

TEST_CASE("contradiction names what differs and who has it", "[comm][quick]") {
  CHECK(contradiction({}) == "");
  CHECK(contradiction({member(1, 3, 11), member(0, 3, 10), member(2, 3, 12)}) == "");
  CHECK(contradiction({member(1, 2, 11), member(0, 2, 10), member(1, 2, 12)}) ==
        "RANK=1 is claimed by two processes: host h, pid 11, and host h, pid 12");
  CHECK(contradiction({member(0, 2, 10), member(1, 3, 11)}) ==
        "WORLD_SIZE differs: '2' on rank 0 (host h, pid 10); '3' on rank 1 (host h, pid 11)");
  auto other = member(1, 2, 11);
  other.library_version = "1.0.1";
  CHECK(contradiction({member(0, 2, 10), other}) ==
        "the version of libfsdp differs: '1.0.0' on rank 0 (host h, pid 10); '1.0.1' on rank 1 (host h, pid 11)");
  other = member(1, 2, 11);
  other.torch_version = "2.10.0";
  CHECK_THAT(contradiction({member(0, 2, 10), other}), ContainsSubstring("the version of LibTorch differs: '2.10.0' on rank 1"));
}

RANK_BODY("two claim rank 0") {
  pretend(0, 2);
  fail_in_time();
}
RANK_BODY("two claim rank 1") {
  pretend(std::min(launched_as(), 1), 2);
  fail_in_time();
}
RANK_BODY("two claim rank 1, without a rank 0") {
  pretend(1, 2);
  fail_in_time();
}
RANK_BODY("another claims rank 1 when the group has been formed") {
  // The group is at work when the late one comes.
  if (launched_as() == 2) std::this_thread::sleep_for(1500ms);
  pretend(std::min(launched_as(), 1), 2);
  fail_in_time();
}

TEST_CASE("two processes with one rank are an error on all", "[comm]") {
  check_all_fail(2, "two claim rank 0", {"RANK=0 is claimed by two processes", "host", "pid"});
  check_all_fail(3, "two claim rank 1", {"RANK=1 is claimed by two processes"});
  check_all_fail(2, "two claim rank 1, without a rank 0", {"RANK=1 is claimed by two processes"});
  check_all_fail(3, "another claims rank 1 when the group has been formed", {"RANK=1 is claimed by two processes"});
}

// Two jobs with one port by mistake: the one that runs must not pay for it.
RANK_BODY("another claims rank 1 when the group has long been at work") {
  const bool late = launched_as() == 2;
  pretend(std::min(launched_as(), 1), 2);
  if (late) std::this_thread::sleep_for(12s);
  if (!late) {
    auto group = fsdp::init_process_group({.timeout = 10s, .rendezvous_timeout = 20s});
    for (int i = 0; i < 700; ++i) {
      group.barrier();
      std::this_thread::sleep_for(20ms);
    }
    return;
  }
  const std::string error = error_of([] { fsdp::init_process_group({.rendezvous_timeout = 20s}); });
  EXPECT(error.find("RANK=1 is claimed by two processes") != std::string::npos, error);
}

TEST_CASE("a process that comes much later cannot end a group at work", "[comm][stress]") {
  const auto results = run_in_own_processes(3, "another claims rank 1 when the group has long been at work", 60s, {{kWithoutGroup, "1"}});
  for (const RankResult& result : results) {
    INFO("process " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK(result.exited);
    CHECK(result.exit_code == 0);
  }
}

RANK_BODY("world sizes 2 and 3") {
  pretend(launched_as(), launched_as() == 0 ? 2 : 3);
  fail_in_time();
}
RANK_BODY("an older library on rank 1") {
  const auto environment = fsdp::comm::read_environment();
  auto self = fsdp::comm::this_process(environment.rank, environment.world_size, "gloo");
  if (environment.rank == 1) self.library_version = "0.0.9";
  const auto started = Clock::now();
  const std::string error = error_of([&] { fsdp::comm::meet(environment, self, 20s); });
  throw_if_late(started, 5s, error);
  throw std::runtime_error(error);
}

TEST_CASE("unequal world sizes or versions are an error on all", "[comm]") {
  check_all_fail(2, "world sizes 2 and 3", {"WORLD_SIZE differs: '2' on rank 0", "'3' on rank 1"});
  check_all_fail(3, "an older library on rank 1", {"the version of libfsdp differs: '0.0.9' on rank 1"});
}

RANK_BODY("rank 2 of 3 does not come") {
  pretend(launched_as(), 3);
  fail_in_time(1500ms);
}
RANK_BODY("rank 0 of 3 does not come") {
  pretend(launched_as() + 1, 3);
  fail_in_time(2500ms);
}

TEST_CASE("a rank that does not come is named when the rendezvous times out", "[comm]") {
  check_all_fail(2, "rank 2 of 3 does not come", {"2 of 3 ranks came", "missing: rank 2", "timed out after 1."});
  check_all_fail(2, "rank 0 of 3 does not come", {"2 of 3 ranks came", "missing: rank 0"});
}
