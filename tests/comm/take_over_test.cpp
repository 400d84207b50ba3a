// A group over somebody's c10d backend and store. The backend here is Gloo's, made as a program that knows c10d would.
#include "comm/collectives.h"
#include "comm/gloo_backend.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/temp_folder.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <signal.h>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::ProcessGroup;
using fsdp::testing::error_of;
using fsdp::testing::kWithoutGroup;
using fsdp::testing::MlpImpl;
using fsdp::testing::run_in_own_processes;
using StorePtr = c10::intrusive_ptr<c10d::Store>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

// Connects nobody.
class Stub final : public c10d::Backend {
 public:
  using Backend::Backend;
  const std::string getBackendName() const override { return "stub"; }
};

int variable(const char* name) { return std::atoi(std::getenv(name)); }

StorePtr users_store() {
  if (std::getenv("STORE_FILE")) return c10::make_intrusive<c10d::FileStore>(std::getenv("STORE_FILE"), variable("WORLD_SIZE"));
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(variable("MASTER_PORT"));
  options.isServer = variable("RANK") == 0;
  options.numWorkers = variable("WORLD_SIZE");
  return c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
}

BackendPtr users_backend(const StorePtr& store) {
  return fsdp::comm::make_gloo({.store = c10::make_intrusive<c10d::PrefixStore>("mine/", store),
                                .rank = variable("RANK"),
                                .world_size = variable("WORLD_SIZE"),
                                .address = "127.0.0.1",
                                .connect_limit = 20s,
                                .timeout = 20s});
}

void check_results(int world_size, const char* body, const std::vector<std::pair<std::string, std::string>>& environment = {}) {
  auto all = environment;
  all.emplace_back(kWithoutGroup, "1");
  for (const auto& result : run_in_own_processes(world_size, body, 60s, all)) {
    INFO(body << ", rank " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK(result.exited);
    CHECK(result.exit_code == 0);
  }
}

}  // namespace

RANK_BODY("trains on a group that was taken over") {
  const auto store = users_store();
  const auto backend = users_backend(store);
  for (int round = 0; round < 2; ++round) {  // one after the other at one store
    auto taken = ProcessGroup::take_over(backend, store, 20s);
    EXPECT(taken.backend() == "gloo" && taken.rank() == variable("RANK") && taken.world_size() == variable("WORLD_SIZE"),
           "rank " << taken.rank() << " of " << taken.world_size() << " over " << taken.backend());
    fsdp::testing::check_parity<MlpImpl>(
        taken, [] { return std::make_shared<MlpImpl>(); },
        [](int rank, int step) {
          return torch::sin(torch::arange(24).reshape({4, 6}) + 100 * rank + 10 * step);
        },
        [](MlpImpl& model, const torch::Tensor& x) { return model.forward(x).square().mean(); });
    EXPECT(error_of([&] { taken.split(0); }).find("a group that was taken over cannot be split") != std::string::npos, "another error");
    taken.barrier();
    taken.close();
  }
  // Both are the caller's still.
  store->set("still there", "yes");
  backend->barrier()->wait();
}

TEST_CASE("a c10d backend is taken over with its store, and given back", "[comm]") {
  check_results(2, "trains on a group that was taken over");
  check_results(3, "trains on a group that was taken over");
  const fsdp::testing::TempFolder folder;
  check_results(2, "trains on a group that was taken over", {{"STORE_FILE", (folder / "store").string()}});
}

RANK_BODY("a rank of a taken group dies") {
  const auto store = users_store();
  auto taken = ProcessGroup::take_over(users_backend(store), store, 20s);
  if (taken.rank() == 1) raise(SIGKILL);
  throw std::runtime_error(error_of([&] {
    while (true) taken.barrier();
  }));
}

TEST_CASE("a killed rank of a taken group is named, as in any other", "[comm]") {
  for (const auto& result : run_in_own_processes(3, "a rank of a taken group dies", 60s, {{kWithoutGroup, "1"}})) {
    if (result.rank == 1) continue;
    INFO("rank " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK(result.exit_code == 1);
    CHECK_THAT(result.message, ContainsSubstring("of 3: barrier failed") && ContainsSubstring("gone: rank 1 (host"));
    CHECK(result.seconds < 30);
  }
}

RANK_BODY("two take over as rank 0") {
  const auto store = users_store();
  const auto stub = c10::make_intrusive<Stub>(0, 2);
  const std::string error = error_of([&] { ProcessGroup::take_over(stub, store, 20s); });
  store->add("read", 1);
  while (variable("RANK") == 0 && store->add("read", 0) < 2) std::this_thread::sleep_for(10ms);  // whoever serves it leaves last
  throw std::runtime_error(error);
}

TEST_CASE("backends that contradict each other are an error on all", "[comm]") {
  for (const auto& result : run_in_own_processes(2, "two take over as rank 0", 60s, {{kWithoutGroup, "1"}})) {
    INFO("process " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK_THAT(result.message, ContainsSubstring("ProcessGroup::take_over, rank 0 of 2: the processes cannot form a group") &&
                                   ContainsSubstring("RANK=0 is claimed by two processes"));
  }
}

TEST_CASE("taking over nothing, or one of several, is an error", "[comm][quick]") {
  const StorePtr store = c10::make_intrusive<c10d::HashStore>();
  const BackendPtr alone = c10::make_intrusive<Stub>(0, 1), one_of_two = c10::make_intrusive<Stub>(0, 2);
  CHECK_THAT(error_of([&] { ProcessGroup::take_over({}, store); }), ContainsSubstring("`backend` is null"));
  CHECK_THAT(error_of([&] { ProcessGroup::take_over(alone, {}); }), ContainsSubstring("`store` is null"));
  CHECK_THAT(error_of([&] { ProcessGroup::take_over(alone, store, 0s); }), ContainsSubstring("`timeout` must be positive, but is 0 ms"));
  CHECK_THAT(error_of([&] { ProcessGroup::take_over(one_of_two, store, 300ms); }),
             ContainsSubstring("rank 0 of 2") && ContainsSubstring("1 of 2 ranks came; missing: rank 1"));
  auto taken = ProcessGroup::take_over(alone, c10::make_intrusive<c10d::HashStore>());
  CHECK(taken.backend() == "stub");
  CHECK_THAT(error_of([&] { taken.barrier(); }), ContainsSubstring("Backend stub does not support barrier"));
}
