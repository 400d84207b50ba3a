#include "plan/module_tree.h"

#include <torch/nn/module.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/normalization.h>

#include <algorithm>
#include <unordered_map>

namespace fsdp {
namespace {

void append_once(std::vector<int>& list, int value) {
  if (std::find(list.begin(), list.end(), value) == list.end()) list.push_back(value);
}

bool is_norm(const torch::nn::Module& module) {
  namespace nn = torch::nn;
  const auto is = [&]<class... Norms>() { return (... || (dynamic_cast<const Norms*>(&module) != nullptr)); };
  return is.template operator()<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::LayerNormImpl, nn::GroupNormImpl,
                                nn::InstanceNorm1dImpl, nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>();
}

class Walker {
 public:
  ModuleTree tree;

  int visit(const torch::nn::Module& module, const std::string& path) {
    const auto [known, first_visit] = node_of_.try_emplace(&module, static_cast<int>(tree.nodes.size()));
    const int node = known->second;
    if (first_visit) tree.nodes.push_back({path, &module, {}, {}});
    // A module met again is walked again all the same: its tensors have further names through this path.
    chain_.push_back(node);
    const std::string prefix = path.empty() ? "" : path + ".";
    const bool norm = is_norm(module);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) add_parameter(node, prefix + item.key(), item.value(), norm);
    for (const auto& item : module.named_buffers(/*recurse=*/false))
      if (first_visit && item.value().defined() && buffer_seen_.try_emplace(item.value().unsafeGetTensorImpl(), true).second)
        tree.buffers.push_back({prefix + item.key(), item.value()});
    for (const auto& item : module.named_children()) {
      const int child = visit(*item.value(), prefix + item.key());
      append_once(tree.nodes[node].children, child);
    }
    chain_.pop_back();
    return node;
  }

 private:
  void add_parameter(int node, std::string name, const at::Tensor& tensor, bool of_norm) {
    if (!tensor.defined()) return;
    const auto [known, first] = parameter_of_.try_emplace(tensor.unsafeGetTensorImpl(), static_cast<int>(tree.parameters.size()));
    if (first) tree.parameters.push_back({tensor, {}, false});
    append_once(tree.nodes[node].parameters, known->second);
    tree.parameters[known->second].registrations.push_back({std::move(name), chain_});
    tree.parameters[known->second].of_norm_module |= of_norm;
  }

  std::vector<int> chain_;
  // Addresses are safe as keys here: the tree under walk holds every module and tensor.
  std::unordered_map<const torch::nn::Module*, int> node_of_;
  std::unordered_map<const c10::TensorImpl*, int> parameter_of_;
  std::unordered_map<const c10::TensorImpl*, bool> buffer_seen_;
};

}  // namespace

ModuleTree walk_modules(const torch::nn::Module& root) {
  Walker walker;
  walker.visit(root, "");
  return std::move(walker.tree);
}

}  // namespace fsdp
