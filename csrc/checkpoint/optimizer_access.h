// Optimizers as checkpoints see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "runtime/flat_views.h"

namespace fsdp {

struct OptimizerEntry {
  std::string parameter;
  int64_t step = 0;
  std::vector<std::pair<const char*, at::Tensor>> slices;  // of the parameter's elements, in the optimizer's own memory
};

struct SavedState {
  int64_t step = 0;
  std::vector<std::string> slices;  // names
};

class OptimizerAccess {
 public:
  using Parameters = std::vector<const ParameterView*>;  // of the model

  virtual ~OptimizerAccess() = default;
  virtual const char* type() const = 0;  // throws c10::Error for one whose state cannot be saved
  virtual std::vector<OptimizerEntry> state(const Parameters& parameters) const = 0;
  virtual std::string options() const = 0;  // of its groups, as JSON
  // Throws c10::Error, before anything changes, for text that is not of this optimizer.
  virtual void check_options(const std::string& text) const = 0;
  virtual void set_options(const std::string& text) = 0;
  // State of zeros for the parameters named, stepped that often; none for all others of the model.
  virtual std::vector<OptimizerEntry> restore(const Parameters& parameters, const std::map<std::string, SavedState>& saved) = 0;
};

}  // namespace fsdp
