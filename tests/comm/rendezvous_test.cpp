// Where the store may be: taken ports, torchrun's agent, a second group in the same processes; and who can reach it.
#include "comm/board.h"
#include "comm/collectives.h"
#include "comm/sockets.h"
#include "support/environment_scope.h"
#include "support/own_sockets.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

#include <torch/torch.h>

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::comm::Attempt;
using fsdp::testing::error_of;
using fsdp::testing::kWithoutGroup;
using fsdp::testing::ReservedPort;
using fsdp::testing::run_in_own_processes;

void check_works(fsdp::ProcessGroup& group) {
  auto tensor = torch::full({3}, group.rank() + 1, at::kLong);
  group.collectives()->all_reduce(tensor, "a check").wait();
  const int64_t expected = group.world_size() * (group.world_size() + 1) / 2;
  EXPECT(tensor[0].item<int64_t>() == expected, "the sum is " << tensor[0].item<int64_t>());
}

}  // namespace

RANKS_TEST("only loopback sockets are open in a group on one host", "[comm][quick]", 2, 3) {
  check_works(group);
  const auto sockets = fsdp::testing::own_sockets();
  EXPECT(sockets.size() >= 2, "only " << sockets.size() << " sockets found: the test looks at the wrong place");
  for (const auto& socket : sockets)
    EXPECT(fsdp::testing::is_loopback(socket.local) && (socket.listens || fsdp::testing::is_loopback(socket.remote)),
           "rank " << group.rank() << " has a " << socket.protocol << " socket from " << socket.local << " to " << socket.remote);
}

RANKS_TEST("a second group in the same processes works beside the first, and after it", "[comm][quick]", 2, 3) {
  {
    fsdp::ProcessGroup second = fsdp::init_process_group({.rendezvous_timeout = 20s});
    check_works(second);
    check_works(group);
    second.close();
    second.close();  // does nothing
    EXPECT(error_of([&] { second.barrier(); }).find("the group has been closed") != std::string::npos, "another error");
  }
  fsdp::ProcessGroup third = fsdp::init_process_group({.rendezvous_timeout = 20s});
  check_works(third);
  check_works(group);
}

RANK_BODY("groups one after the other") {
  // Whoever is fast meets the store of the group before, which is about to end.
  for (int round = 0; round < 5; ++round) {
    fsdp::ProcessGroup next = fsdp::init_process_group({.rendezvous_timeout = 20s});
    check_works(next);
  }
}

TEST_CASE("groups follow each other at one port", "[comm]") {
  for (const auto& result : run_in_own_processes(3, "groups one after the other", 60s, {{kWithoutGroup, "1"}})) {
    INFO(result.message << "\n" << result.output);
    CHECK(result.exit_code == 0);
    CHECK(result.exited);
  }
}

RANK_BODY("joins or says why not") {
  fsdp::ProcessGroup joined = fsdp::init_process_group({.rendezvous_timeout = 20s});
  check_works(joined);
}

namespace {

void check_taken(int port) {
  for (const auto& result :
       run_in_own_processes(2, "joins or says why not", 60s, {{kWithoutGroup, "1"}, {"MASTER_PORT", std::to_string(port)}})) {
    INFO(result.message << "\n" << result.output);
    CHECK(result.exit_code == 1);
    CHECK_THAT(result.message, ContainsSubstring("port " + std::to_string(port) + " is taken by another program"));
    CHECK_THAT(result.message, ContainsSubstring("MASTER_PORT=" + std::to_string(port)));
    CHECK(result.seconds < 15);
  }
}

}  // namespace

TEST_CASE("a port where another program listens and says nothing is a clear error on all ranks", "[comm]") {
  const ReservedPort port;
  const Attempt stranger = fsdp::comm::listen_on("127.0.0.1", static_cast<uint16_t>(port.port()));
  REQUIRE(stranger.error == 0);
  check_taken(port.port());
}

TEST_CASE("a port where another program listens and hangs up is a clear error on all ranks", "[comm][stress]") {
  const ReservedPort port;
  const Attempt stranger = fsdp::comm::listen_on("127.0.0.1", static_cast<uint16_t>(port.port()));
  REQUIRE(stranger.error == 0);
  std::atomic<bool> stop = false;
  std::thread hangs_up([&] {
    while (!stop) {
      const int fd = accept(stranger.socket.fd(), nullptr, nullptr);
      if (fd >= 0) close(fd);
    }
  });
  check_taken(port.port());
  stop = true;
  fsdp::comm::connect_to("127.0.0.1", static_cast<uint16_t>(port.port()), 1s);  // wakes it
  hangs_up.join();
}

TEST_CASE("torchrun's own store serves every restart", "[comm]") {
  const ReservedPort port;
  const auto number = static_cast<uint16_t>(port.port());
  Attempt listening = fsdp::comm::listen_on("127.0.0.1", number);
  REQUIRE(listening.error == 0);
  const auto agent = fsdp::comm::host_store("127.0.0.1", number, listening.socket.release());
  for (const char* restart : {"0", "1"}) {
    const auto results = run_in_own_processes(2, "joins or says why not", 60s,
                                              {{kWithoutGroup, "1"},
                                               {"MASTER_PORT", std::to_string(port.port())},
                                               {"TORCHELASTIC_USE_AGENT_STORE", "True"},
                                               {"TORCHELASTIC_RESTART_COUNT", restart}});
    for (const auto& result : results) {
      INFO("restart " << restart << ": " << result.message << "\n" << result.output);
      CHECK(result.exited);
      CHECK(result.exit_code == 0);
    }
  }
}
