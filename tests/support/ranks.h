// Tests over several ranks.
//
//     RANKS_TEST("all_reduce sums over ranks", "[comm][quick]", 1, 2, 3) {   // world sizes
//       auto t = torch::full({5}, float(group.rank()));
//       ...
//       EXPECT(t[0].item<float>() == 3.f, "rank " << group.rank() << " got " << t[0]);
//     }
//
// The body runs on every rank, in a pool of worker processes that is started once per world size and serves many tests. A failed
// EXPECT, or any exception, fails the test on the main process with the rank, the text and what the ranks printed, and the pool is
// started anew; so it is after a body that left the group closed, failed or out of step.
// Catch2's own assertions belong to the main process: not in bodies.
#pragma once

#include <fsdp/process_group.h>

#include <catch2/catch_test_macros.hpp>

#include <chrono>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace fsdp::testing {

using RankBody = void (*)(ProcessGroup& group);

// Registers `body` under `name` at static initialisation, in the main process and in the workers alike.
struct RegisterRankBody {
  RegisterRankBody(const char* name, RankBody body);
};

// Runs the body registered as `name` on the pool of `world_size` ranks; fails the current Catch2 test if a rank fails or the
// time limit passes. Main process only.
void run_on_pool(int world_size, const std::string& name, std::chrono::seconds limit = std::chrono::seconds(60));

// The same for a test that wants to know: "" or what went wrong, rank by rank.
std::string problem_on_pool(int world_size, const std::string& name, std::chrono::seconds limit);

// How one rank of its own process ended.
struct RankResult {
  int rank = 0;
  bool exited = false;  // false: ended by `signal`
  int exit_code = 0;    // 0: body returned; 1: body threw
  int signal = 0;
  bool killed_by_limit = false;
  std::string message;  // what the body threw, or ""
  std::string output;   // stdout and stderr, the last 8 KB
  double seconds = 0;   // from start of the rank to its end
};

// Runs the body registered as `name` in fresh processes, for tests that kill, stop or end ranks. `environment` is added to every
// rank's; an empty value unsets. Never fails the test by itself. Main process only.
std::vector<RankResult> run_in_own_processes(int world_size, const std::string& name, std::chrono::seconds limit = std::chrono::seconds(60),
                                             const std::vector<std::pair<std::string, std::string>>& environment = {});

// In `environment`, {kWithoutGroup, "1"} has the ranks join nothing: their bodies get a group of one process, and may call
// init_process_group themselves.
inline constexpr const char* kWithoutGroup = "FSDP_TEST_WITHOUT_GROUP";

// Ends all workers. Main process only, after the last test.
void end_pools();

// Runs f and returns the text of the exception it throws (without LibTorch's backtrace); fails the rank if it throws nothing.
std::string error_of(const std::function<void()>& f);

}  // namespace fsdp::testing

#define EXPECT(condition, explanation)                                                           \
  do {                                                                                           \
    if (!(condition)) {                                                                          \
      std::ostringstream expect_out;                                                             \
      expect_out << __FILE__ << ":" << __LINE__ << ": expected " #condition "; " << explanation; \
      throw std::runtime_error(expect_out.str());                                                \
    }                                                                                            \
  } while (false)

#define FSDP_CONCAT2(a, b) a##b
#define FSDP_CONCAT(a, b) FSDP_CONCAT2(a, b)

// A body for run_in_own_processes, or one that several tests run.
#define RANK_BODY(name)                                                                                                   \
  static void FSDP_CONCAT(rank_body_, __LINE__)(fsdp::ProcessGroup & group);                                              \
  static const fsdp::testing::RegisterRankBody FSDP_CONCAT(register_, __LINE__)(name, FSDP_CONCAT(rank_body_, __LINE__)); \
  static void FSDP_CONCAT(rank_body_, __LINE__)([[maybe_unused]] fsdp::ProcessGroup & group)

#define RANKS_TEST(name, tags, ...)                                                                                       \
  static void FSDP_CONCAT(rank_body_, __LINE__)(fsdp::ProcessGroup & group);                                              \
  static const fsdp::testing::RegisterRankBody FSDP_CONCAT(register_, __LINE__)(name, FSDP_CONCAT(rank_body_, __LINE__)); \
  TEST_CASE(name, tags) {                                                                                                 \
    for (int world_size : {__VA_ARGS__}) {                                                                                \
      INFO("world size " << world_size);                                                                                  \
      fsdp::testing::run_on_pool(world_size, name);                                                                       \
    }                                                                                                                     \
  }                                                                                                                       \
  static void FSDP_CONCAT(rank_body_, __LINE__)([[maybe_unused]] fsdp::ProcessGroup & group)
