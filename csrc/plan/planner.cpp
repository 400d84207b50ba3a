#include "plan/planner.h"

#include <c10/core/ScalarType.h>

#include <algorithm>
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

int64_t bytes_of(c10::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

// Everything about a parameter but its name and shape: what its group has in common.
PlannedGroup kind_of(const ModuleTree::Parameter& parameter, const FsdpOptions& options) {
  const auto& precision = options.mixed_precision;
  const auto& name = parameter.registrations.front().name;
  PlannedGroup kind;
  kind.dtype = kind.compute_dtype = kind.reduce_dtype = parameter.tensor.scalar_type();
  kind.trainable = parameter.tensor.requires_grad();
  kind.replicated = options.unsharded && options.unsharded(name);
  if (!c10::isFloatingType(kind.dtype)) return kind;
  if (precision.reduce_dtype) kind.reduce_dtype = *precision.reduce_dtype;
  if (!precision.param_dtype || kind.replicated) return kind;
  const bool keeps = parameter.of_norm_module || (precision.keep_fp32 && precision.keep_fp32(name));
  kind.kept_wide = keeps && bytes_of(kind.dtype) > bytes_of(*precision.param_dtype);
  if (kind.kept_wide) return kind;
  kind.compute_dtype = *precision.param_dtype;
  kind.keeps_master = kind.trainable || precision.keep_frozen_master || kind.dtype == kind.compute_dtype;
  if (!kind.keeps_master) kind.dtype = kind.compute_dtype;
  return kind;
}

bool same_kind(const PlannedGroup& a, const PlannedGroup& b) {
  const auto all = [](const PlannedGroup& g) {
    return std::tie(g.dtype, g.compute_dtype, g.reduce_dtype, g.trainable, g.keeps_master, g.kept_wide, g.replicated);
  };
  return all(a) == all(b);
}

int ranks_of(const PlannedGroup& group, int world_size) { return group.replicated ? 1 : world_size; }

void lay_out(PlannedGroup& group, int world_size) {
  std::vector<int64_t> numels;
  for (const auto& parameter : group.parameters) numels.push_back(parameter.numel);
  const FlatLayout layout(std::move(numels), alignment_of(group), ranks_of(group, world_size));
  for (size_t i = 0; i < group.parameters.size(); ++i) group.parameters[i].offset = layout.offset(static_cast<int64_t>(i));
  group.shard_numel = layout.shard_numel();
  group.counts_numel = layout.counts_numel();
}

// Gradients of replicated parameters are all-reduced in pieces of about this size, while backward goes on.
constexpr int64_t kBucketBytes = 4 << 20;

bool is_full(const PlannedGroup& group) { return group.replicated && group.numel() * bytes_of(group.reduce_dtype) >= kBucketBytes; }

}  // namespace

int64_t alignment_of(const PlannedGroup& group) {
  return alignment_in_elements({bytes_of(group.dtype), bytes_of(group.compute_dtype), bytes_of(group.reduce_dtype)});
}

PlannedModel make_plan(const ModuleTree& tree, const std::vector<bool>& units, int world_size, const FsdpOptions& options) {
  std::vector<std::vector<int>> owned(tree.nodes.size());
  std::vector<PlannedGroup> kinds;
  for (size_t p = 0; p < tree.parameters.size(); ++p) {
    kinds.push_back(kind_of(tree.parameters[p], options));
    const int owner = kinds.back().replicated ? 0 : owner_of(tree.parameters[p], units);
    owned[owner].push_back(static_cast<int>(p));
  }

  PlannedModel model;
  model.plan.world_size = world_size;
  model.buffers = tree.buffers;
  for (size_t node = 0; node < tree.nodes.size(); ++node) {
    if (owned[node].empty()) continue;
    PlannedUnit unit;
    unit.name = tree.nodes[node].path;
    std::vector<std::vector<at::Tensor>> tensors;
    for (const int p : owned[node]) {  // groups appear in order of their first parameter
      size_t g = 0;
      while (g < unit.groups.size() && (!same_kind(unit.groups[g], kinds[p]) || is_full(unit.groups[g]))) ++g;
      if (g == unit.groups.size()) {
        unit.groups.push_back(kinds[p]);
        tensors.emplace_back();
      }
      unit.groups[g].parameters.push_back(describe(tree.parameters[p]));
      tensors[g].push_back(tree.parameters[p].tensor);
    }
    for (auto& group : unit.groups) lay_out(group, world_size);
    model.plan.units.push_back(std::move(unit));
    model.tensors.push_back(std::move(tensors));
  }
  return model;
}

}  // namespace fsdp
