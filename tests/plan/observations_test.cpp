#include "plan/observations.h"

#include <fsdp/fsdp.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "plan/planner.h"
#include "plan/unit_selection.h"
#include "support/models.h"
#include "support/ranks.h"

using namespace fsdp::testing;
using Catch::Matchers::ContainsSubstring;
namespace nn = torch::nn;

namespace {

std::vector<std::string> observed(const nn::Module& module, const fsdp::WrapPolicy& policy, int world_size = 2) {
  const auto tree = fsdp::walk_modules(module);
  return fsdp::observe(tree, fsdp::make_plan(tree, fsdp::select_units(tree, policy), world_size).plan);
}

}  // namespace

TEST_CASE("a plan that saves little says so", "[plan][quick]") {
  Mlp net;
  const auto one_unit = observed(*net, {});
  REQUIRE(one_unit.size() == 1);
  CHECK_THAT(one_unit[0], ContainsSubstring("one unit of 155 elements") && ContainsSubstring("auto_wrap_policy"));
  const auto mostly_root = observed(*net, fsdp::lambda_auto_wrap_policy([&](const nn::Module& m) { return &m == net->fc1.get(); }));
  REQUIRE(mostly_root.size() == 1);
  CHECK_THAT(mostly_root[0], ContainsSubstring("the root unit holds 64 %"));
  CHECK(observed(*net, fsdp::size_based_auto_wrap_policy(1)).empty());
  CHECK(observed(*net, {}, 1).empty());  // one process has nothing to save
}

// `head->weight = embedding->weight` looks like a tie and is none: the dictionary keeps the tensor that was registered.
TEST_CASE("a tie by assignment is reported with both names", "[plan][quick]") {
  struct Tied : nn::Module {
    Tied() {
      embedding = register_module("embedding", nn::Embedding(5, 4));
      head = register_module("head", nn::Linear(nn::LinearOptions(4, 5).bias(false)));
      head->weight = embedding->weight;
    }
    nn::Embedding embedding{nullptr};
    nn::Linear head{nullptr};
  } net;
  const auto said = observed(net, fsdp::size_based_auto_wrap_policy(1));
  REQUIRE(said.size() == 1);
  CHECK_THAT(said[0], ContainsSubstring("member 'head.weight' is 'embedding.weight'") && ContainsSubstring("register_parameter"));
}

TEST_CASE("a view taken before wrapping is reported", "[plan][quick]") {
  Mlp net;
  const auto policy = fsdp::size_based_auto_wrap_policy(1);
  CHECK(observed(*net, policy).empty());
  const auto kept = net->fc2->weight.detach();
  const auto said = observed(*net, policy);
  REQUIRE(said.size() == 1);
  CHECK_THAT(said[0], ContainsSubstring("1 parameter ('fc2.weight' first)") && ContainsSubstring("follow no training"));
}

RANKS_TEST("parameters that share memory are refused by their names", "[plan][errors][quick]", 1, 2) {
  struct Shares : nn::Module {
    Shares(int64_t begin_of_second, torch::Tensor whole) {
      register_parameter("first", whole.narrow(0, 0, 4).detach());
      register_parameter("second", whole.narrow(0, begin_of_second, 4).detach());
    }
  };
  const auto text = error_of([&] { fsdp::FullyShardedDataParallel model(std::make_shared<Shares>(3, torch::zeros({8})), group); });
  EXPECT(text.find("'first' and 'second' share memory") != std::string::npos, text);
  fsdp::FullyShardedDataParallel beside(std::make_shared<Shares>(4, torch::zeros({8})), group);
}

TEST_CASE("policies by type and by function choose the modules they name", "[plan][quick]") {
  TiedGpt gpt;
  const auto tree = fsdp::walk_modules(*gpt);
  const auto names = [&](const fsdp::WrapPolicy& policy) {
    const auto units = fsdp::select_units(tree, policy);
    std::string chosen;
    for (size_t i = 1; i < units.size(); ++i)
      if (units[i]) chosen += tree.nodes[i].path + " ";
    return chosen;
  };
  CHECK(names(fsdp::module_wrap_policy<GptBlockImpl>()) == "blocks.0 blocks.1 ");
  CHECK(names(fsdp::module_wrap_policy<GptBlockImpl, TiedHeadImpl>()) == "blocks.0 blocks.1 head ");
  CHECK(names(fsdp::lambda_auto_wrap_policy([](const nn::Module& m) {
          return m.children().empty() && !m.parameters().empty();
        })).find("embed.token ") == 0);
  CHECK_THROWS_WITH(fsdp::lambda_auto_wrap_policy(nullptr), ContainsSubstring("empty function"));
  CHECK_THROWS_WITH(fsdp::size_based_auto_wrap_policy(-1),
                    ContainsSubstring("min_num_params counts elements and must be at least 0, got -1"));
}

RANKS_TEST("a policy that throws is an error on all ranks", "[plan][errors][quick]", 1, 2) {
  Mlp net;
  const auto text = error_of([&] {
    fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::lambda_auto_wrap_policy([&](const nn::Module&) -> bool {
                                                        if (group.rank() == group.world_size() - 1)
                                                          throw std::runtime_error("no such layer");
                                                        return true;
                                                      })});
  });
  EXPECT(text.find("the wrap policy failed: no such layer") != std::string::npos, text);
  EXPECT(net->fc1->weight.dim() == 2, "the module changed");
}
