#include "plan/planner.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "layout/flat_layout.h"

namespace fsdp {
namespace {

// The deepest unit on every way from the root to the tensor.
int owner_of(const ModuleTree::Parameter& parameter, const std::vector<bool>& units) {
  const auto& ways = parameter.registrations;
  const auto& first = ways.front().chain;
  for (auto node = first.rbegin(); node != first.rend(); ++node) {
    const auto contains = [&](const auto& way) { return std::find(way.chain.begin(), way.chain.end(), *node) != way.chain.end(); };
    if (units[*node] && std::all_of(ways.begin(), ways.end(), contains)) return *node;
  }
  return 0;
}

PlannedParameter describe(const ModuleTree::Parameter& parameter) {
  PlannedParameter planned;
  planned.name = parameter.registrations.front().name;
  for (size_t i = 1; i < parameter.registrations.size(); ++i) planned.other_names.push_back(parameter.registrations[i].name);
  planned.shape = parameter.tensor.sizes().vec();
  planned.numel = parameter.tensor.numel();
  return planned;
}

void lay_out(PlannedGroup& group, int world_size) {
  std::vector<int64_t> numels;
  for (const auto& parameter : group.parameters) numels.push_back(parameter.numel);
  const auto bytes = [](c10::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); };
  const FlatLayout layout(std::move(numels), alignment_in_elements({bytes(group.dtype), bytes(group.compute_dtype)}), world_size);
  for (size_t i = 0; i < group.parameters.size(); ++i) group.parameters[i].offset = layout.offset(static_cast<int64_t>(i));
  group.shard_numel = layout.shard_numel();
  group.counts_numel = layout.counts_numel();
}

}  // namespace

PlannedModel make_plan(const ModuleTree& tree, const std::vector<bool>& units, int world_size,
                       std::optional<c10::ScalarType> compute_dtype) {
  std::vector<std::vector<int>> owned(tree.nodes.size());
  for (size_t p = 0; p < tree.parameters.size(); ++p) owned[owner_of(tree.parameters[p], units)].push_back(static_cast<int>(p));

  PlannedModel model;
  model.plan.world_size = world_size;
  model.buffers = tree.buffers;
  for (size_t node = 0; node < tree.nodes.size(); ++node) {
    if (owned[node].empty()) continue;
    PlannedUnit unit;
    unit.name = tree.nodes[node].path;
    std::vector<std::vector<at::Tensor>> tensors;
    std::map<std::tuple<c10::ScalarType, bool>, size_t> group_of;  // groups appear in order of their first parameter
    for (const int p : owned[node]) {
      const auto& tensor = tree.parameters[p].tensor;
      const auto [known, first] = group_of.try_emplace({tensor.scalar_type(), tensor.requires_grad()}, unit.groups.size());
      if (first) {
        PlannedGroup group;
        group.dtype = tensor.scalar_type();
        group.compute_dtype = compute_dtype && c10::isFloatingType(group.dtype) ? *compute_dtype : group.dtype;
        group.trainable = tensor.requires_grad();
        unit.groups.push_back(std::move(group));
        tensors.emplace_back();
      }
      unit.groups[known->second].parameters.push_back(describe(tree.parameters[p]));
      tensors[known->second].push_back(tensor);
    }
    for (auto& group : unit.groups) lay_out(group, world_size);
    model.plan.units.push_back(std::move(unit));
    model.tensors.push_back(std::move(tensors));
  }
  return model;
}

}  // namespace fsdp
