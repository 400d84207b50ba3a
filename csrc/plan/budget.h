// How many bytes the unsharded buffers of a planned model may take at once.
#pragma once

#include <fsdp/options.h>
#include <fsdp/plan.h>

#include <cstdint>

namespace fsdp {

struct UnshardedBudget {
  int64_t bytes = 0;
  bool strict = false;  // an operator that needs more at once: true: is an error; false: gets more
};

// Throws c10::Error that names the least value when options.max_unsharded_bytes is too small.
UnshardedBudget choose_budget(const Plan& plan, const FsdpOptions& options, int rank);

}  // namespace fsdp
