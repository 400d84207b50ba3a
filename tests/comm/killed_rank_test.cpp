// A rank dies, or stops, while the others are in a collective with it.
#include "comm/collectives.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

#include <torch/torch.h>

#include <signal.h>
#include <unistd.h>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using Catch::Matchers::StartsWith;
using fsdp::comm::Pending;
using fsdp::testing::error_of;
using fsdp::testing::kWithoutGroup;
using fsdp::testing::run_in_own_processes;
using Clock = std::chrono::steady_clock;

constexpr int64_t kElements = 1 << 20;  // 4 MiB a rank: an operation takes longer than it takes to die

Pending start(const fsdp::ProcessGroup& group, const std::string& operation) {
  auto& seam = *group.collectives();
  const int64_t n = group.world_size();
  if (operation == "all_gather") return seam.all_gather(torch::empty({kElements * n}), torch::ones({kElements}), "unit 'a', forward");
  if (operation == "reduce_scatter")
    return seam.reduce_scatter(torch::empty({kElements}), torch::ones({kElements * n}), "unit 'a', backward");
  return seam.all_reduce(torch::ones({kElements}), "gradient norm");
}

int variable(const char* name) { return std::atoi(std::getenv(name)); }

}  // namespace

RANK_BODY("victim dies in a collective") {
  const std::string operation = std::getenv("OPERATION");
  start(group, operation).wait();
  auto pending = start(group, operation);
  const auto died = Clock::now();  // at the latest when the others begin to wait
  if (group.rank() == variable("VICTIM")) raise(SIGKILL);
  const std::string error = error_of([&] {
    // The victim may have done its part before it died: then the next one fails.
    for (pending.wait(); Clock::now() - died < 5s;) start(group, operation).wait();
  });
  EXPECT(Clock::now() - died < 5s, "the error came late: " << error);
  // Leaving must not hang either, which `seconds` below shows.
  throw std::runtime_error(error);
}

namespace {

void check_survivors(int world_size, int victim, const std::string& operation) {
  INFO("world size " << world_size << ", victim " << victim << ", " << operation);
  const auto results =
      run_in_own_processes(world_size, "victim dies in a collective", 40s, {{"VICTIM", std::to_string(victim)}, {"OPERATION", operation}});
  for (const auto& result : results) {
    INFO("rank " << result.rank << ": " << result.message << "\n" << result.output);
    if (result.rank == victim) {
      CHECK(result.signal == SIGKILL);
      CHECK_FALSE(result.killed_by_limit);
      continue;
    }
    CHECK(result.exited);
    CHECK(result.exit_code == 1);
    CHECK_THAT(result.message, StartsWith("rank " + std::to_string(result.rank) + " of " + std::to_string(world_size) + ": " + operation));
    CHECK_THAT(result.message, ContainsSubstring("gone: rank " + std::to_string(victim)));
    CHECK(result.seconds < results[victim].seconds + 5);
  }
}

}  // namespace

TEST_CASE("a rank killed in a collective ends the others with an error that names it", "[comm]") {
  check_survivors(2, 0, "all_gather");
  check_survivors(3, 1, "reduce_scatter");
  check_survivors(4, 0, "all_reduce");
}

TEST_CASE("a rank killed in a collective, twelve ways", "[comm][stress]") {
  const std::vector<std::string> operations{"all_gather", "reduce_scatter", "all_reduce"};
  for (int world_size = 2; world_size <= 4; ++world_size)
    for (int i = 0; i < 4; ++i) check_survivors(world_size, i % world_size, operations[(i + world_size) % 3]);
}

// A stopped rank keeps its connections: only the timeout tells. Nor does the store answer where it was its host that stopped.
RANK_BODY("victim stops in a collective") {
  fsdp::ProcessGroup timed = fsdp::init_process_group({.timeout = 1s, .rendezvous_timeout = 20s});
  const int victim = variable("VICTIM");
  const auto pids = timed.collectives()->exchange("pids", std::to_string(getpid()));
  timed.barrier();
  if (timed.rank() == victim) raise(SIGSTOP);
  const auto stopped = Clock::now();
  const std::string error = error_of([&] { start(timed, "all_gather").wait(); });
  const auto noticed = Clock::now() - stopped;
  timed.close();
  const auto closed = Clock::now() - stopped;
  if (timed.rank() == (victim + 1) % timed.world_size()) kill(std::stoi(pids[victim]), SIGKILL);
  EXPECT(noticed < 4s && closed < 6s, "noticed after " << noticed / 1ms << " ms, closed after " << closed / 1ms << " ms: " << error);
  throw std::runtime_error(error);
}

TEST_CASE("a rank that stops ends the others at the timeout", "[comm]") {
  for (const int victim : {0, 2}) {
    INFO("victim " << victim);
    const auto results =
        run_in_own_processes(3, "victim stops in a collective", 40s, {{kWithoutGroup, "1"}, {"VICTIM", std::to_string(victim)}});
    for (const auto& result : results) {
      if (result.rank == victim) continue;
      INFO("rank " << result.rank << ": " << result.message << "\n" << result.output);
      CHECK(result.exit_code == 1);
      CHECK_THAT(result.message, StartsWith("rank " + std::to_string(result.rank) + " of 3: all_gather (unit 'a', forward) failed after"));
      // "gone" where the rank that ends the victim was faster than this one.
      const std::string who = ": rank " + std::to_string(victim) + " (host";
      CHECK_THAT(result.message, ContainsSubstring("stopped" + who) || ContainsSubstring("gone" + who));
    }
  }
}
