#include "comm/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>

namespace fsdp::comm {

namespace {

constexpr const char* kRequired[] = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"};
constexpr const char* kRemedy =
    "; start the program with torchrun or scripts/launch, or set none of RANK, WORLD_SIZE, MASTER_ADDR and "
    "MASTER_PORT to run a single process";

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

std::string required(const char* name) {
  const auto value = variable(name);
  TORCH_CHECK(value, "environment variable ", name, " is missing", kRemedy);
  TORCH_CHECK(!value->empty(), "environment variable ", name, " is set but empty", kRemedy);
  return *value;
}

int number(const char* name, const std::string& text, int least, int largest, const std::string& range) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK(error != std::errc::invalid_argument && end == text.data() + text.size(), "environment variable ", name, "='", text,
              "' is not a whole number (expected ", range, ")");
  TORCH_CHECK(error == std::errc() && value >= least && value <= largest, "environment variable ", name, "=", text,
              " is out of range: expected ", range);
  return value;
}

bool flag(const char* name) {
  const std::string text = variable(name).value_or("");
  if (text.empty() || text == "False" || text == "false" || text == "0") return false;
  TORCH_CHECK(text == "True" || text == "true" || text == "1", "environment variable ", name, "='", text, "' is neither True nor False");
  return true;
}

}  // namespace

Environment read_environment() {
  Environment result;
  bool any = false;
  for (const char* name : kRequired) any = any || variable(name);
  if (!any) return result;
  constexpr int kMost = std::numeric_limits<int>::max();

  // The world size comes first, since the range of a rank depends on it; a missing variable is reported before a wrong one.
  for (const char* name : kRequired) required(name);
  result.world_size = number("WORLD_SIZE", required("WORLD_SIZE"), 1, kMost, "at least 1");
  const std::string ranks = c10::str("0 to ", result.world_size - 1, ", since WORLD_SIZE=", result.world_size);
  result.rank = number("RANK", required("RANK"), 0, result.world_size - 1, ranks);
  if (const auto local_rank = variable("LOCAL_RANK")) number("LOCAL_RANK", *local_rank, 0, result.world_size - 1, ranks);
  result.master_addr = required("MASTER_ADDR");
  result.master_port = static_cast<uint16_t>(number("MASTER_PORT", required("MASTER_PORT"), 1, 65535, "1 to 65535"));
  result.agent_store = flag("TORCHELASTIC_USE_AGENT_STORE");
  if (const auto restarts = variable("TORCHELASTIC_RESTART_COUNT"))
    result.restart_count = number("TORCHELASTIC_RESTART_COUNT", *restarts, 0, kMost, "at least 0");
  return result;
}

}  // namespace fsdp::comm
