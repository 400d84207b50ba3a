// What a user should hear of a model and its plan before training: nothing here is an error.
#pragma once

#include <fsdp/plan.h>

#include <string>
#include <vector>

#include "plan/module_tree.h"

namespace fsdp {

// One sentence each:
// * a plan that saves little memory, since one unit holds most of the model (over ranks only);
// * a member tensor that is not the one its module registers (`head->weight = embedding->weight`): the module computes with it, but
//   LibTorch's parameters(), and so everything built on them, knows the registered one. Found in LibTorch's own layers;
// * parameters whose memory other tensors share, which will not follow training.
std::vector<std::string> observe(const ModuleTree& tree, const Plan& plan);

}  // namespace fsdp
