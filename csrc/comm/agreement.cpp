#include "comm/agreement.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <xxhash.h>

namespace fsdp::comm {

std::string hash_of(std::string_view bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

std::vector<std::string> exchange_or_refuse(Collectives& collectives, const std::string& topic, const std::string& text,
                                            const std::string& refusal, const char* action) {
  if (collectives.world_size() == 1) {
    TORCH_CHECK(refusal.empty(), refusal);
    return {};
  }
  const std::string refuses = "refuses: ";
  auto answers = collectives.exchange(topic, refusal.empty() ? text : refuses + refusal);
  TORCH_CHECK(refusal.empty(), refusal);
  for (const auto& answer : answers)
    TORCH_CHECK(!answer.starts_with(refuses), "another rank cannot ", action, ": ", answer.substr(refuses.size()));
  return answers;
}

}  // namespace fsdp::comm
