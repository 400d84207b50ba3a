/// Small values over the ranks of a group, for programs that train: means of losses, a wish to stop, a mistake that one rank has found.
///
///     fsdp::run_on_all(group, "reading the data", [&] { tokens = read(path); });
///     const auto sums = fsdp::sum_over_ranks(group, {loss_sum, double(count), interrupted ? 1. : 0.});
///
/// Thread safety: as ProcessGroup. All ranks must call, in the same order. At world size 1 nothing is communicated.
#pragma once

#include <fsdp/export.h>
#include <fsdp/process_group.h>

#include <functional>
#include <string>
#include <vector>

namespace fsdp {

/// The element-wise sum, added in the same order on every rank, so that it is the same to the last bit. REQUIRES: the same number of values
/// on all ranks. Throws c10::Error for a group on CUDA devices, and as collectives do.
FSDP_API std::vector<double> sum_over_ranks(const ProcessGroup& group, const std::vector<double>& values);

/// Runs `body`, which must not communicate, and returns when it has succeeded on all ranks. Where it throws on some, every rank throws: one
/// that failed its own exception, the others a c10::Error with `what`, the lowest rank that failed and its text. So a rank that cannot go
/// on leaves nobody waiting.
FSDP_API void run_on_all(const ProcessGroup& group, const std::string& what, const std::function<void()>& body);

}  // namespace fsdp
