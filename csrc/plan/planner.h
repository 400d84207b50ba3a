// From a module tree and a choice of units to a plan.
#pragma once

#include <fsdp/options.h>
#include <fsdp/plan.h>

#include <optional>
#include <string>
#include <vector>

#include "plan/budget.h"
#include "plan/module_tree.h"

namespace fsdp {

struct PlannedModel {
  Plan plan;
  UnshardedBudget budget;
  // The tensors behind plan.units[u].groups[g].parameters[p].
  std::vector<std::vector<std::vector<at::Tensor>>> tensors;
  std::vector<ModuleTree::Buffer> buffers;
};

// Every tensor gets one owner: the innermost unit that contains all modules which register it, so a weight tied across units
// belongs to a unit around both. Replicated ones form groups of the root unit. Of the options, mixed_precision and unsharded are read.
PlannedModel make_plan(const ModuleTree& tree, const std::vector<bool>& units, int world_size, const FsdpOptions& options = {});

// Elements: what offsets in the group's buffers are multiples of.
int64_t alignment_of(const PlannedGroup& group);

// The plan as text that is equal on two ranks exactly if their plans are: one line per fact, for comparison and for naming the
// first difference.
std::vector<std::string> agreement_lines(const Plan& plan);

}  // namespace fsdp
