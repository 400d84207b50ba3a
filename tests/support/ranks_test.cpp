// The harness itself: what a failing test over several ranks tells, and what it leaves behind.
#include "support/ranks.h"
#include "support/rank_process.h"
#include "support/temp_folder.h"
#include "support/worker.h"

#include <torch/torch.h>

#include <signal.h>
#include <unistd.h>

#include <fstream>
#include <iostream>
#include <thread>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::testing::problem_on_pool;

}  // namespace

RANK_BODY("rank 1 is wrong") {
  std::cout << "printed by rank " << group.rank() << std::endl;
  EXPECT(group.rank() != 1, "rank " << group.rank() << " is wrong");
  group.barrier();  // in which rank 0 hears of it
}
RANK_BODY("all is well") { group.barrier(); }
RANK_BODY("rank 1 ends its process") {
  if (group.rank() == 1) raise(SIGKILL);
}
RANK_BODY("rank 0 does not come to an end") {
  if (group.rank() == 0) std::this_thread::sleep_for(1h);
}
RANK_BODY("rank 0 leaves the group") {
  if (group.rank() == 0) group.close();
}

TEST_CASE("a failed rank is reported with its text and its output, and the next test finds a new pool", "[comm]") {
  const std::string problem = problem_on_pool(2, "rank 1 is wrong", 20s);
  CHECK_THAT(problem, ContainsSubstring("rank 1: ") && ContainsSubstring("expected group.rank() != 1; rank 1 is wrong"));
  CHECK_THAT(problem, ContainsSubstring("rank 0: rank 0 of 2: barrier failed after"));
  CHECK_THAT(problem, ContainsSubstring("output of rank 0:\n    printed by rank 0") && ContainsSubstring("printed by rank 1"));
  CHECK(problem_on_pool(2, "all is well", 20s) == "");

  CHECK_THAT(problem_on_pool(2, "rank 1 ends its process", 20s), ContainsSubstring("rank 1: ended by signal 9 (Killed)"));
  CHECK(problem_on_pool(2, "all is well", 20s) == "");

  CHECK(problem_on_pool(2, "rank 0 leaves the group", 20s) == "");
  CHECK(problem_on_pool(2, "all is well", 20s) == "");

  CHECK_THAT(problem_on_pool(2, "nobody knows this name", 20s), ContainsSubstring("no rank body is named 'nobody knows this name'"));
}

TEST_CASE("a body that does not end is ended at the limit", "[comm]") {
  const auto started = std::chrono::steady_clock::now();
  const std::string problem = problem_on_pool(2, "rank 0 does not come to an end", 1s);
  CHECK_THAT(problem, ContainsSubstring("within 1 s") && ContainsSubstring("rank 0: still running, ended by the harness"));
  CHECK(std::chrono::steady_clock::now() - started < 15s);
}

RANK_BODY("says where it is and waits") {
  std::ofstream(std::getenv("WHERE")) << getpid() << std::endl;
  std::this_thread::sleep_for(1h);
}
RANK_BODY("starts a rank of its own and waits") {
  fsdp::testing::run_in_own_processes(1, "says where it is and waits", 60s, {{fsdp::testing::kWithoutGroup, "1"}});
}

TEST_CASE("ranks end with the process that started them", "[comm]") {
  const fsdp::testing::TempFolder folder;
  const std::string where = folder / "pid";
  pid_t grandchild = 0;
  {
    fsdp::testing::RankProcess child(fsdp::testing::kOwnMode, {{fsdp::testing::kWithoutGroup, "1"}, {"WHERE", where}});
    child.send({"run", "starts a rank of its own and waits"});
    for (int i = 0; i < 1000 && !grandchild; ++i) {
      std::ifstream(where) >> grandchild;
      std::this_thread::sleep_for(20ms);
    }
    REQUIRE(grandchild > 0);
    child.kill();
  }
  // Nobody is left to collect the grandchild but the system, which may take a moment.
  for (int i = 0; i < 500 && kill(grandchild, 0) == 0; ++i) std::this_thread::sleep_for(10ms);
  CHECK(kill(grandchild, 0) != 0);
}

TEST_CASE("a folder goes with its owner", "[comm][quick]") {
  std::filesystem::path path;
  {
    const fsdp::testing::TempFolder folder;
    path = folder.path();
    std::ofstream(folder / "file") << "text";
    CHECK(std::filesystem::exists(folder / "file"));
  }
  CHECK_FALSE(std::filesystem::exists(path));
}
