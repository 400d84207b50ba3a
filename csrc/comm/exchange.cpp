#include <fsdp/exchange.h>

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>

#include "comm/collectives.h"

namespace fsdp {
namespace {

// Why a rank failed, in one line where it was LibTorch that threw.
std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error& known) {
    return known.what_without_backtrace();
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

}  // namespace

std::vector<double> sum_over_ranks(const ProcessGroup& group, const std::vector<double>& values) {
  if (group.world_size() == 1 || values.empty()) return values;
  TORCH_CHECK(group.backend() != "nccl",
              "sum_over_ranks: the group's collectives work on CUDA devices; make one with .backend = \"gloo\" for "
              "values on the host");
  auto tensor = at::empty({static_cast<int64_t>(values.size())}, at::kDouble);
  auto* const data = tensor.mutable_data_ptr<double>();
  std::copy(values.begin(), values.end(), data);
  group.collectives()->all_reduce(tensor, "sum over ranks").wait();
  return {data, data + values.size()};
}

void run_on_all(const ProcessGroup& group, const std::string& what, const std::function<void()>& body) {
  std::exception_ptr own;
  try {
    body();
  } catch (...) {
    own = std::current_exception();
  }
  if (group.world_size() == 1) {
    if (own) std::rethrow_exception(own);
    return;
  }
  const auto texts = group.collectives()->exchange(what, own ? "failed: " + text_of(own) : "");
  if (own) std::rethrow_exception(own);
  for (size_t rank = 0; rank < texts.size(); ++rank) TORCH_CHECK(texts[rank].empty(), what, ": rank ", rank, " ", texts[rank]);
}

}  // namespace fsdp
