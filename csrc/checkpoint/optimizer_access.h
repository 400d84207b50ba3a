// Optimizers as checkpoints see them.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

struct OptimizerEntry {
  std::string parameter;
  int64_t step = 0;
  std::vector<std::pair<const char*, at::Tensor>> slices;  // of the parameter's elements, in the optimizer's own memory
};

class OptimizerAccess {
 public:
  virtual ~OptimizerAccess() = default;
  virtual const char* type() const = 0;
  virtual std::vector<OptimizerEntry> state() const = 0;
  virtual std::string options() const = 0;  // of its groups, as JSON
  // Throws c10::Error, before anything changes, for text that is not of this optimizer.
  virtual void check_options(const std::string& text) const = 0;
  virtual void set_options(const std::string& text) = 0;
  // State of zeros for the parameters named, stepped that often; none for all others.
  virtual std::vector<OptimizerEntry> restore(const std::map<std::string, int64_t>& steps) = 0;
};

}  // namespace fsdp
