// What check_launch.py starts: not as the ranks of a test, but as torchrun or mpirun start any program.
#include "support/models.h"
#include "support/parity.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

namespace {

using namespace std::chrono_literals;
using fsdp::testing::MlpImpl;

int variable(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}

}  // namespace

// FSDP_TEST_FAILING_RANK ends its process in the middle of the first attempt.
TEST_CASE("trains as launched", "[.launched]") {
  auto group = fsdp::init_process_group({.timeout = 20s, .rendezvous_timeout = 20s});
  const int attempt = variable("TORCHELASTIC_RESTART_COUNT", 0), failing = variable("FSDP_TEST_FAILING_RANK", -1);
  const auto batch = [&](int rank, int step) {
    if (attempt == 0 && group.rank() == failing && step == 2) _exit(7);
    return torch::sin(torch::arange(24).reshape({4, 6}) + 100 * rank + 10 * step);
  };
  fsdp::testing::check_parity<MlpImpl>(
      group, [] { return std::make_shared<MlpImpl>(); }, batch,
      [](MlpImpl& model, const torch::Tensor& x) { return model.forward(x).square().mean(); },
      {.fsdp = {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(50)}});
  std::printf("attempt %d: rank %d of %d trained\n", attempt, group.rank(), group.world_size());
}
