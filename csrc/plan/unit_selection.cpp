#include "plan/unit_selection.h"

#include <optional>
#include <set>

namespace fsdp {
namespace {

class Selector {
 public:
  Selector(const ModuleTree& tree, const WrapPolicy& policy)
      : selected(tree.nodes.size(), false), tree_(tree), policy_(policy), taken_(tree.nodes.size()) {}

  std::vector<bool> selected;

  // Returns how many elements of the subtree belong to units at or below `node`.
  int64_t visit(int node) {
    if (taken_[node]) return *taken_[node];
    const auto& module = *tree_.nodes[node].module;
    const int64_t all = numel_below(node);
    int64_t taken = 0;
    if (policy_(module, /*recurse=*/true, all)) {
      for (const int child : tree_.nodes[node].children) taken += visit(child);
      if (node != 0 && policy_(module, /*recurse=*/false, all - taken)) {
        selected[node] = true;
        taken = all;
      }
    }
    taken_[node] = taken;
    return taken;
  }

 private:
  int64_t numel_below(int node) const {
    std::set<int> parameters;
    collect(node, parameters);
    int64_t numel = 0;
    for (const int p : parameters) numel += tree_.parameters[p].tensor.numel();
    return numel;
  }

  void collect(int node, std::set<int>& parameters) const {
    parameters.insert(tree_.nodes[node].parameters.begin(), tree_.nodes[node].parameters.end());
    for (const int child : tree_.nodes[node].children) collect(child, parameters);
  }

  const ModuleTree& tree_;
  const WrapPolicy& policy_;
  std::vector<std::optional<int64_t>> taken_;
};

}  // namespace

std::vector<bool> select_units(const ModuleTree& tree, const WrapPolicy& policy) {
  Selector selector(tree, policy);
  if (policy) selector.visit(0);
  selector.selected[0] = true;
  return std::move(selector.selected);
}

}  // namespace fsdp
