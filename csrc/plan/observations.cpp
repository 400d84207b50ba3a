#include "plan/observations.h"

#include <fmt/format.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>

namespace fsdp {
namespace {

constexpr double kMost = 0.5;

std::string name_of(const ModuleTree& tree, const at::Tensor& tensor) {
  for (const auto& parameter : tree.parameters)
    if (parameter.tensor.is_same(tensor)) return "'" + parameter.registrations.front().name + "'";
  return "an unregistered tensor";
}

void compare(const ModuleTree& tree, const ModuleTree::Node& node, const char* name, const at::Tensor& member,
             std::vector<std::string>& said) {
  const auto registered = node.module->named_parameters(/*recurse=*/false);
  const auto* entry = registered.find(name);
  if (!entry || !member.defined() || entry->is_same(member)) return;
  said.push_back(fmt::format(
      "member '{0}{1}{2}' is {3}, not the parameter that the module registers under this name. The module computes with the member; "
      "the registered parameter is never used, and a tie meant by the assignment is none. To tie, register the shared tensor "
      "(register_parameter) or share the module",
      node.path, node.path.empty() ? "" : ".", name, name_of(tree, member)));
}

template <class Layer>
void compare_members(const ModuleTree& tree, const ModuleTree::Node& node, std::vector<std::string>& said) {
  const auto* layer = dynamic_cast<const Layer*>(node.module);
  if (!layer) return;
  compare(tree, node, "weight", layer->weight, said);
  if constexpr (requires { layer->bias; }) compare(tree, node, "bias", layer->bias, said);
}

template <class... Layers>
void compare_members_of(const ModuleTree& tree, std::vector<std::string>& said) {
  for (const auto& node : tree.nodes) (compare_members<Layers>(tree, node, said), ...);
}

void judge_units(const Plan& plan, std::vector<std::string>& said) {
  if (plan.world_size == 1 || plan.units.empty()) return;
  const auto elements = [](const PlannedUnit& unit) {
    int64_t sum = 0;
    for (const auto& group : unit.groups) sum += group.numel();
    return sum;
  };
  const auto largest =
      std::max_element(plan.units.begin(), plan.units.end(), [&](const auto& a, const auto& b) { return elements(a) < elements(b); });
  const double share = static_cast<double>(elements(*largest)) / static_cast<double>(std::max<int64_t>(1, plan.numel()));
  if (share <= kMost) return;
  if (plan.units.size() == 1)
    said.push_back(
        fmt::format("the model is one unit of {} elements, whole during forward and backward: sharding saves optimizer memory only. "
                    "Set auto_wrap_policy, size_based_auto_wrap_policy(min_num_params) for one, to part it",
                    plan.numel()));
  else
    said.push_back(
        fmt::format("{} holds {:.0f} % of the model's {} elements and is gathered as one: a wrap policy with smaller units saves memory",
                    largest->name.empty() ? "the root unit" : "unit '" + largest->name + "'", 100 * share, plan.numel()));
}

// A view or detached handle taken before wrapping holds the storage, and goes on holding the values of that moment.
void find_shared_storages(const ModuleTree& tree, std::vector<std::string>& said) {
  std::vector<std::string> names;
  for (const auto& parameter : tree.parameters)
    if (parameter.tensor.has_storage() && parameter.tensor.storage().use_count() > 1) names.push_back(parameter.registrations.front().name);
  if (names.empty()) return;
  said.push_back(
      fmt::format("{} parameter{} ('{}' first) share{} memory with other tensors: views or detached handles made before wrapping keep the "
                  "values of this moment and follow no training. Take them again after wrapping, inside the wrapper's call",
                  names.size(), names.size() == 1 ? "" : "s", names.front(), names.size() == 1 ? "s" : ""));
}

}  // namespace

std::vector<std::string> observe(const ModuleTree& tree, const Plan& plan) {
  std::vector<std::string> said;
  judge_units(plan, said);
  find_shared_storages(tree, said);
  namespace nn = torch::nn;
  compare_members_of<nn::LinearImpl, nn::BilinearImpl, nn::EmbeddingImpl, nn::EmbeddingBagImpl, nn::Conv1dImpl, nn::Conv2dImpl,
                     nn::Conv3dImpl, nn::ConvTranspose1dImpl, nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl, nn::LayerNormImpl,
                     nn::GroupNormImpl, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl>(tree, said);
  return said;
}

}  // namespace fsdp
