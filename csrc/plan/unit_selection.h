// Which modules of a tree become units.
#pragma once

#include <fsdp/wrap_policy.h>

#include <vector>

#include "plan/module_tree.h"

namespace fsdp {

// One flag per node of the tree; the root is always a unit. The policy is asked as PyTorch's recursive auto-wrapping asks it:
// on the way down with all elements of the subtree, on the way up with those that no unit below has taken. A module reached on
// two ways is asked once. An empty policy selects the root alone.
std::vector<bool> select_units(const ModuleTree& tree, const WrapPolicy& policy);

}  // namespace fsdp
