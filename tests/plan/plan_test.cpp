#include <fsdp/plan.h>
#include <fsdp/wrap_policy.h>

#include <catch2/catch_test_macros.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

#include "plan/planner.h"
#include "plan/unit_selection.h"
#include "support/models.h"

using namespace fsdp::testing;
using Catch::Matchers::ContainsSubstring;
namespace nn = torch::nn;

namespace {

fsdp::Plan plan_of(const nn::Module& module, const fsdp::WrapPolicy& policy, int world_size = 2) {
  const auto tree = fsdp::walk_modules(module);
  return fsdp::make_plan(tree, fsdp::select_units(tree, policy), world_size).plan;
}

std::vector<std::string> unit_names(const fsdp::Plan& plan) {
  std::vector<std::string> names;
  for (const auto& unit : plan.units) names.push_back(unit.name);
  return names;
}

using Names = std::vector<std::string>;

nn::Linear linear(int64_t in, int64_t out) { return nn::Linear(nn::LinearOptions(in, out).bias(false)); }

}  // namespace

// What PyTorch's size_based_auto_wrap_policy decides for the same trees, worked out by hand from its rule.
TEST_CASE("size policy: bottom-up, inclusive, on what is not wrapped yet", "[plan][quick]") {
  struct Pair : nn::Module {
    Pair() : first(register_module("0", linear(4, 4))), second(register_module("1", linear(4, 4))) {}  // 16 + 16
    torch::Tensor forward(torch::Tensor x) { return second(first(x)); }
    nn::Linear first, second;
  };
  nn::Sequential net(linear(2, 4), std::make_shared<Pair>(), linear(4, 5));  // 8, 32, 20
  // A threshold met exactly counts. The pair has nothing left once both of its children are units.
  CHECK(unit_names(plan_of(*net, fsdp::size_based_auto_wrap_policy(16))) == Names{"", "1.0", "1.1", "2"});
  // Neither child is large enough, the remainder of their parent is.
  CHECK(unit_names(plan_of(*net, fsdp::size_based_auto_wrap_policy(17))) == Names{"", "1", "2"});
  CHECK(unit_names(plan_of(*net, fsdp::size_based_auto_wrap_policy(33))) == Names{""});
  // Below the threshold as a whole: nothing is entered.
  CHECK(unit_names(plan_of(*net, fsdp::size_based_auto_wrap_policy(61))) == Names{""});
  CHECK(unit_names(plan_of(*net, {})) == Names{""});
}

TEST_CASE("size policy: ModuleList is entered but never a unit, MultiheadAttention is never entered", "[plan][quick]") {
  struct Net : nn::Module {
    Net() {
      list = register_module("list", nn::ModuleList(linear(4, 4), linear(2, 2)));
      attention = register_module("attention", nn::MultiheadAttention(nn::MultiheadAttentionOptions(4, 2)));
    }
    nn::ModuleList list{nullptr};
    nn::MultiheadAttention attention{nullptr};
  } net;
  CHECK(unit_names(plan_of(net, fsdp::size_based_auto_wrap_policy(4))) == Names{"", "list.0", "list.1"});
  CHECK(unit_names(plan_of(net, fsdp::size_based_auto_wrap_policy(5))) == Names{"", "list.0"});
  // The list as a whole (20) reaches 17, but a ModuleList has no forward of its own.
  CHECK(unit_names(plan_of(net, fsdp::size_based_auto_wrap_policy(17))) == Names{""});
}

TEST_CASE("a tied tensor has one owner: the innermost unit around all its users", "[plan][quick]") {
  TiedGpt gpt;
  const auto plan = plan_of(*gpt, fsdp::size_based_auto_wrap_policy(10));
  int found = 0;
  for (const auto& unit : plan.units)
    for (const auto& group : unit.groups)
      for (const auto& parameter : group.parameters)
        if (parameter.name == "embed.token.weight") {
          ++found;
          CHECK(unit.name.empty());
          CHECK(parameter.other_names == Names{"head.weight"});
        }
  CHECK(found == 1);
  CHECK_THAT(plan.to_string(), ContainsSubstring("embed.token.weight is also head.weight"));
}

TEST_CASE("a module registered twice is one unit, its tensors have both names", "[plan][quick]") {
  struct Twice : nn::Module {
    Twice() {
      auto shared = linear(3, 3);
      a = register_module("a", shared);
      b = register_module("b", shared);
    }
    nn::Linear a{nullptr}, b{nullptr};
  } net;
  const auto plan = plan_of(net, fsdp::size_based_auto_wrap_policy(1));
  CHECK(unit_names(plan) == Names{"a"});
  CHECK(plan.numel() == 9);
  CHECK(plan.units[0].groups[0].parameters[0].other_names == Names{"b.weight"});
}

TEST_CASE("flat groups part by dtype and trainability", "[plan][quick]") {
  struct Mixed : nn::Module {
    Mixed() {
      register_parameter("a", torch::zeros({3}));
      register_parameter("b", torch::zeros({4}, torch::kBFloat16));
      register_parameter("c", torch::zeros({5}), /*requires_grad=*/false);
      register_parameter("d", torch::zeros({6}));
      register_parameter("e", torch::zeros({7}, torch::kByte), false);
    }
  } net;
  const auto plan = plan_of(net, {});
  REQUIRE(plan.units.size() == 1);
  const auto& groups = plan.units[0].groups;
  REQUIRE(groups.size() == 4);
  CHECK(groups[0].parameters.size() == 2);  // a and d
  CHECK(groups[0].numel() == 9);
  CHECK(groups[1].dtype == torch::kBFloat16);
  CHECK_FALSE(groups[2].trainable);
  CHECK(groups[3].dtype == torch::kByte);
}

TEST_CASE("the plan as a table", "[plan][quick]") {
  Mlp net;
  const auto text = plan_of(*net, fsdp::size_based_auto_wrap_policy(50), 2).to_string();
  CHECK(text ==
        "unit    parameters        elements  dtype                   per rank   share\n"
        "(root)           2              27  Float                       64 B   17.4%\n"
        "fc1              2              56  Float                      112 B   36.1%\n"
        "fc2              2              72  Float                      144 B   46.5%\n"
        "155 elements in 3 units over 2 ranks: 320 B of parameters per rank, 640 B when whole\n");
}

TEST_CASE("agreement lines differ exactly where plans do", "[plan][quick]") {
  Mlp a, b, wider(9);
  const auto policy = fsdp::size_based_auto_wrap_policy(1);
  CHECK(fsdp::agreement_lines(plan_of(*a, policy)) == fsdp::agreement_lines(plan_of(*b, policy)));
  CHECK(fsdp::agreement_lines(plan_of(*a, policy)) != fsdp::agreement_lines(plan_of(*wider, policy)));
  CHECK(fsdp::agreement_lines(plan_of(*a, policy)) != fsdp::agreement_lines(plan_of(*a, {})));
  CHECK(fsdp::agreement_lines(plan_of(*a, policy, 2)) != fsdp::agreement_lines(plan_of(*a, policy, 3)));
  b->fc1->weight.set_requires_grad(false);
  CHECK(fsdp::agreement_lines(plan_of(*a, policy)) != fsdp::agreement_lines(plan_of(*b, policy)));
}
