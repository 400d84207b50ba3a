#include "wrappers/plan_agreement.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "comm/agreement.h"
#include "plan/planner.h"

namespace fsdp {
namespace {

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

// For the first lines in which the texts differ: each variant with the ranks that have it.
std::string first_differences(const std::vector<std::string>& texts) {
  constexpr int kShown = 3;
  std::vector<std::vector<std::string>> by_rank;
  size_t length = 0;
  for (const auto& text : texts) {
    by_rank.push_back(split_lines(text));
    length = std::max(length, by_rank.back().size());
  }
  std::string report;
  int shown = 0;
  for (size_t i = 0; i < length && shown < kShown; ++i) {
    std::map<std::string, std::vector<int>> variants;
    for (size_t rank = 0; rank < by_rank.size(); ++rank)
      variants[i < by_rank[rank].size() ? by_rank[rank][i] : "nothing"].push_back(static_cast<int>(rank));
    if (variants.size() == 1) continue;
    ++shown;
    for (const auto& [line, ranks] : variants)
      report += fmt::format("\n  {} {}: {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "), line);
  }
  return report;
}

}  // namespace

void agree_on_plan(comm::Collectives& collectives, const Plan& plan, const FsdpOptions& options, const std::string& refusal) {
  std::string text = fmt::format("{}\n", fmt::join(agreement_lines(plan), "\n"));
  const auto dtype_name = [](const auto& dtype) { return dtype ? c10::toString(*dtype) : "as it is"; };
  const auto& precision = options.mixed_precision;
  text += fmt::format("precision: parameters {}, buffers {}, outputs {}, inputs cast {}\n", dtype_name(precision.param_dtype),
                      dtype_name(precision.buffer_dtype), dtype_name(precision.output_dtype), precision.cast_forward_inputs);
  text += fmt::format("options: sync_module_states {}, check_order {}, parameter_writes {}, strict budget {}\n", options.sync_module_states,
                      static_cast<int>(options.check_order), static_cast<int>(options.parameter_writes),
                      options.max_unsharded_bytes.has_value());
  const auto answers =
      comm::exchange_or_refuse(collectives, "plan of a model being wrapped", comm::hash_of(text), refusal, "wrap the model");
  if (std::all_of(answers.begin(), answers.end(), [&](const std::string& hash) { return hash == answers.front(); })) return;
  const auto texts = collectives.exchange("differing plans of a model being wrapped", text);
  TORCH_CHECK(false, "rank ", collectives.rank(),
              ": the ranks are wrapping different models, or wrap one model differently; build the same module with the same options on "
              "every rank. "
              "First differences:",
              first_differences(texts));
}

}  // namespace fsdp
