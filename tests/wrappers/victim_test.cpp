// One rank is killed or stopped in the middle of training, in each phase of it: the others end with an error that names it.

#include <fsdp/fsdp.h>

#include <signal.h>
#include <unistd.h>

#include <chrono>

#include "support/decorated_collectives.h"
#include "support/models.h"
#include "support/ranks.h"

using namespace std::chrono_literals;
using namespace fsdp::testing;
using Catch::Matchers::ContainsSubstring;
using Clock = std::chrono::steady_clock;

namespace {

constexpr auto kTimeout = 2s;

// Raises a signal when it is about to begin the operation whose purpose ends like this.
class DyingCollectives : public DecoratedCollectives {
 public:
  DyingCollectives(std::shared_ptr<fsdp::comm::Collectives> inner, fsdp::comm::Operation operation, std::string purpose, int signal)
      : DecoratedCollectives(std::move(inner)), operation_(operation), purpose_(std::move(purpose)), signal_(signal) {}

 protected:
  std::unique_ptr<fsdp::comm::Work> start(const fsdp::comm::Request& request) override {
    if (signal_ && request.operation == operation_ && request.purpose.ends_with(purpose_)) raise(std::exchange(signal_, 0));
    return DecoratedCollectives::start(request);
  }

 private:
  fsdp::comm::Operation operation_;
  std::string purpose_;
  int signal_;
};

struct Phase {
  const char* name;
  fsdp::comm::Operation operation;
  const char* purpose;  // empty: not in an operation
};

const std::vector<Phase>& phases() {
  using fsdp::comm::Operation;
  static const std::vector<Phase> phases{{"wrap", Operation::BROADCAST, "unit 'blocks.1', wrap"},
                                         {"forward", Operation::ALL_GATHER, "unit 'blocks.1', forward"},
                                         {"backward", Operation::ALL_GATHER, "unit 'blocks.0', backward"},
                                         {"reduction", Operation::REDUCE_SCATTER, "unit 'blocks.1', backward"},
                                         {"clipping", Operation::ALL_REDUCE, "clip_grad_norm_"},
                                         {"optimizer step", Operation::BARRIER, ""}};
  return phases;
}

std::string variable(const char* name) { return std::getenv(name); }

}  // namespace

RANK_BODY("a victim of training") {
  auto own = fsdp::init_process_group({.timeout = kTimeout, .rendezvous_timeout = 20s});
  const int victim = std::stoi(variable("VICTIM")), signal = std::stoi(variable("SIGNAL"));
  const auto& phase = phases()[std::stoul(variable("PHASE"))];
  const auto pids = own.collectives()->exchange("pids", std::to_string(getpid()));
  const auto started = Clock::now();
  fsdp::ProcessGroup used = own;
  if (own.rank() == victim)
    used = fsdp::ProcessGroup(std::make_shared<DyingCollectives>(own.collectives(), phase.operation, phase.purpose, signal));
  const std::string error = error_of([&] {
    TiedGpt net(3);
    fsdp::FullyShardedDataParallel model(net, used, {.auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>()});
    torch::optim::AdamW optimizer(model.parameters(), 1e-3);
    for (int step = 0; step < 3; ++step) {
      model(torch::arange(14).reshape({2, 7})).square().mean().backward();
      model.clip_grad_norm_(1.0);
      if (own.rank() == victim && !*phase.purpose && step == 1) raise(signal);
      optimizer.step();
      optimizer.zero_grad();
    }
  });
  const auto passed = Clock::now() - started;
  own.close();
  if (own.rank() == (victim + 1) % own.world_size() && signal == SIGSTOP) kill(std::stoi(pids[victim]), SIGKILL);
  EXPECT(passed < (signal == SIGKILL ? 5s : kTimeout + 2s), "noticed after " << passed / 1ms << " ms: " << error);
  throw std::runtime_error(error);
}

TEST_CASE("a rank killed or stopped in any phase of training ends the others with an error that names it", "[wrappers][victim]") {
  for (const int signal : {SIGKILL, SIGSTOP})
    for (size_t phase = 0; phase < phases().size(); ++phase)
      for (const int victim : {0, 1}) {
        const int world_size = 2 + static_cast<int>(phase % 2);
        INFO((signal == SIGKILL ? "killed" : "stopped") << " in " << phases()[phase].name << ", rank " << victim << " of " << world_size);
        const auto results = run_in_own_processes(world_size, "a victim of training", 40s,
                                                  {{kWithoutGroup, "1"},
                                                   {"VICTIM", std::to_string(victim)},
                                                   {"SIGNAL", std::to_string(signal)},
                                                   {"PHASE", std::to_string(phase)}});
        for (const auto& result : results) {
          if (result.rank == victim) continue;
          INFO("rank " << result.rank << ": " << result.message << "\n" << result.output);
          CHECK(result.exit_code == 1);
          const std::string who = ": rank " + std::to_string(victim) + " (host";
          CHECK_THAT(result.message, ContainsSubstring("stopped" + who) || ContainsSubstring("gone" + who));
        }
      }
}
