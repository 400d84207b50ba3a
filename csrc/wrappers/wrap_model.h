// From a user's module to a sharded model: walk, plan, agree, shard. What all wrappers begin with.
#pragma once

#include <fsdp/options.h>
#include <fsdp/process_group.h>

#include <torch/ordered_dict.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/sharded_model.h"

namespace torch::nn {
class Module;
}

namespace fsdp {

struct WrappedModel {
  std::shared_ptr<ShardedModel> model;
  std::vector<std::pair<std::string, at::Tensor>> parameters;  // each tensor once, under its first name
  std::vector<std::pair<std::string, at::Tensor>> buffers;
};

// All ranks must call. An error leaves the module as it was.
WrappedModel wrap_model(const torch::nn::Module& module, const ProcessGroup& group, const FsdpOptions& options);

// Throws c10::Error that names the first trainable parameter in the module tree that is not sharded: registered after wrapping, or put in
// the place of one that is. `wrapped`: the names then.
void check_still_wrapped(const torch::nn::Module& module, const torch::OrderedDict<std::string, at::Tensor>& wrapped, int rank);

}  // namespace fsdp
