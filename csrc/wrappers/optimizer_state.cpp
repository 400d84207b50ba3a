#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/optimizer_state.h>
#include <torch/optim/lbfgs.h>

#include <algorithm>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "comm/agreement.h"
#include "optim/torch_optimizer_state.h"
#include "runtime/sharded_model.h"

namespace fsdp {
namespace {

namespace optim = torch::optim;

// A state tensor that shall become this rank's slice.
struct Change {
  at::Tensor* tensor;
  const ShardedParameter* parameter;
};

// What one rank's optimizer holds: what to change, and a line on each parameter, for comparison with the other ranks.
struct Findings {
  std::vector<Change> changes;
  std::string lines;
};

constexpr const char* kAnything = "-";  // compares equal to all: a rank that holds a slice cannot know the whole

std::string hash_of_values(const at::Tensor& tensor) {
  const auto plain = tensor.contiguous();
  const std::string_view bytes(static_cast<const char*>(plain.const_data_ptr()), plain.nbytes());
  return comm::hash_of(bytes);
}

Findings search(optim::Optimizer& optimizer, const ShardedModel& model) {
  TORCH_CHECK(!dynamic_cast<optim::LBFGS*>(&optimizer),
              "shard_optimizer_state: torch::optim::LBFGS keeps one state for all parameters together and compares whole gradients; it "
              "cannot train a sharded model. Use SGD, Adam, AdamW, RMSprop or Adagrad");
  Findings findings;
  for (const auto& unit : model.units())
    for (const auto& group : unit->groups)
      for (const auto& parameter : group->parameters) {
        const auto found = optimizer.state().find(parameter.handle.unsafeGetTensorImpl());
        if (found == optimizer.state().end()) {
          findings.lines += "nothing\n";
          continue;
        }
        const auto [tensors, step] = look_into(*found->second, "shard_optimizer_state: parameter '" + parameter.name + "'");
        findings.lines += "step " + std::to_string(step);
        for (const auto& [name, tensor] : tensors) {
          if (!tensor->defined()) continue;
          const bool is_slice = tensor->sizes() == parameter.slice.sizes();
          TORCH_CHECK(is_slice || tensor->sizes() == at::IntArrayRef(parameter.full_shape), "rank ", group->rank,
                      ": shard_optimizer_state: ", name, " of parameter '", parameter.name, "' has shape ", tensor->sizes(),
                      "; expected the parameter's full shape ", at::IntArrayRef(parameter.full_shape), " or this rank's slice ",
                      parameter.slice.sizes(), ". Nothing was changed; build the optimizer anew");
          findings.lines += std::string(" ") + name + " " + (is_slice ? kAnything : hash_of_values(*tensor));
          if (!is_slice) findings.changes.push_back({tensor, &parameter});
        }
        findings.lines += "\n";
      }
  return findings;
}

std::vector<std::string> split(const std::string& text, char at) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, at);) parts.push_back(part);
  return parts;
}

bool agree(const std::string& line, const std::string& other) {
  const auto words = split(line, ' '), other_words = split(other, ' ');
  return words.size() == other_words.size() &&
         std::equal(words.begin(), words.end(), other_words.begin(),
                    [](const auto& a, const auto& b) { return a == b || a == kAnything || b == kAnything; });
}

// Throws on all ranks when one refuses or holds other state: its slices would belong to another history than its neighbours'.
void agree_on_state(ShardedModel& model, const std::string& lines, const std::string& refusal) {
  const auto answers = comm::exchange_or_refuse(model.collectives().seam(), "optimizer state", lines, refusal, "shard its optimizer state");
  if (answers.empty()) return;
  std::vector<std::vector<std::string>> by_rank;
  for (const auto& answer : answers) by_rank.push_back(split(answer, '\n'));
  size_t line = 0;
  for (const auto& unit : model.units())
    for (const auto& group : unit->groups)
      for (const auto& parameter : group->parameters) {
        for (int rank = 1; rank < model.world_size(); ++rank)
          TORCH_CHECK(agree(by_rank[0][line], by_rank[rank][line]),
                      "shard_optimizer_state: ranks hold different optimizer state for parameter '", parameter.name,
                      "'; slices of different histories would make one patchwork. Make the same steps, or load the same "
                      "file, on every rank, or build the optimizer anew. Steps and hashes: rank 0: ",
                      by_rank[0][line], "; rank ", rank, ": ", by_rank[rank][line]);
        ++line;
      }
}

}  // namespace

void shard_optimizer_state(optim::Optimizer& optimizer, const FullyShardedBase& wrapper) {
  c10::AutoGradMode no_grad(false);
  auto& model = *wrapper.model();
  Findings findings;
  const auto refusal = comm::refusal_of([&] { findings = search(optimizer, model); });
  agree_on_state(model, findings.lines, refusal);
  for (auto& [tensor, parameter] : findings.changes) {
    const ShardSlice part = parameter->group->layout.slice(parameter->index, model.rank());
    // A copy: a view would keep the whole state alive.
    *tensor = parameter->in_memory_order(*tensor).narrow(0, part.begin_in_parameter, part.length).clone();
  }
}

}  // namespace fsdp
