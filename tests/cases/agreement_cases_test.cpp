// Cases in which ranks, or steps, take different ways: see the story of each at its test.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"

using namespace fsdp::testing;
namespace nn = torch::nn;

namespace {

struct ThreeImpl : nn::Module {
  ThreeImpl() {
    a = register_module("a", nn::Linear(6, 6));
    b = register_module("b", nn::Linear(6, 6));
    c = register_module("c", nn::Linear(6, 6));
  }
  torch::Tensor forward(torch::Tensor x, bool swapped) {
    x = torch::tanh(a(x));
    return swapped ? b(torch::tanh(c(x))) : c(torch::tanh(b(x)));
  }
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
};

}  // namespace

// B8: the order of gathers was recorded in the first step; another one later hung, or threw the record away at every step.
RANKS_TEST("B8: the order of units differs from step to step", "[cases][B8][quick]", 1, 2, 3) {
  for (const auto strategy : {fsdp::ShardingStrategy::FULL_SHARD, fsdp::ShardingStrategy::SHARD_GRAD_OP}) {
    ParityOptions options;
    options.steps = 6;
    options.fsdp = {.sharding_strategy = strategy, .auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()};
    check_parity<ThreeImpl>(
        group, [] { return std::make_shared<ThreeImpl>(); },
        [](int rank, int step) {
          torch::manual_seed(seed_of(step, rank));
          return std::pair{torch::randn({3, 6}), step % 2 == 1};
        },
        [](ThreeImpl& net, const std::pair<torch::Tensor, bool>& batch) { return net.forward(batch.first, batch.second).square().sum(); },
        options);
  }
}

// H7: a store that went before the group, operations in flight at the end, or ranks that leave in different orders hung or crashed.
RANK_BODY("H7: leaves in some order") {
  const int way = std::atoi(std::getenv("WAY"));
  auto own = std::make_unique<fsdp::ProcessGroup>(fsdp::init_process_group());
  auto net = std::make_unique<TiedGpt>(2);
  auto model = std::make_unique<fsdp::FullyShardedDataParallel<TiedGptImpl>>(
      *net, *own, fsdp::FsdpOptions{.auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>()});
  auto optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(), 1e-3);
  torch::Tensor loss;
  for (int step = 0; step < 3; ++step) {
    loss = (*model)(torch::arange(14).reshape({2, 7})).square().mean();  // the last one with its graph alive, gathers in its wake
    if (step < 2) loss.backward();
  }
  switch (way) {
    case 0:
      model.reset(), optimizer.reset(), own.reset(), net.reset(), loss.reset();
      break;
    case 1:
      own.reset(), net.reset(), loss.reset(), optimizer.reset(), model.reset();
      break;
    case 2:
      own->close(), loss.reset(), model.reset(), net.reset();
      break;
    case 3:
      static auto* leaked = model.release();
      (void)leaked;
      break;
    default:
      break;  // as scopes end
  }
}

TEST_CASE("H7: model, optimizer, graph and group may go in any order", "[cases][H7]") {
  for (int way = 0; way < 5; ++way)
    for (const auto& result : run_in_own_processes(2, "H7: leaves in some order", std::chrono::seconds(30),
                                                   {{kWithoutGroup, "1"}, {"WAY", std::to_string(way)}})) {
      INFO("way " << way << ", rank " << result.rank << ": " << result.message << "\n" << result.output);
      CHECK(result.exited);
      CHECK(result.exit_code == 0);
    }
}
