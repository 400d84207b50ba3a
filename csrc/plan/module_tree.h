// A module tree as the planner sees it: every module and every tensor once, with all the names it is registered under.
//
// LibTorch's own parameters() lists a tensor as often as it is registered; here identity decides.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

struct ModuleTree {
  struct Node {
    std::string path;  // of the first registration; empty for the root
    const torch::nn::Module* module = nullptr;
    std::vector<int> children;    // each once
    std::vector<int> parameters;  // registered in this module itself, each once
  };
  struct Registration {
    std::string name;        // dotted, from the root
    std::vector<int> chain;  // nodes from the root to the module that registers it
  };
  struct Parameter {
    at::Tensor tensor;
    std::vector<Registration> registrations;
    bool of_norm_module = false;  // registered in one of LibTorch's
  };
  struct Buffer {
    std::string name;
    at::Tensor tensor;
  };

  std::vector<Node> nodes;  // pre-order, the root first
  std::vector<Parameter> parameters;
  std::vector<Buffer> buffers;
};

ModuleTree walk_modules(const torch::nn::Module& root);

}  // namespace fsdp
