// Environment variables for the length of a scope.
#pragma once

#include "support/rank_process.h"

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

// Sets variables (an empty value unsets) and restores what they were.
class EnvironmentScope {
 public:
  explicit EnvironmentScope(const Variables& variables) {
    for (const auto& [name, value] : variables) {
      const char* before = std::getenv(name.c_str());
      before_.emplace_back(name, before ? std::optional<std::string>(before) : std::nullopt);
      value.empty() ? unsetenv(name.c_str()) : setenv(name.c_str(), value.c_str(), 1);
    }
  }
  EnvironmentScope(const EnvironmentScope&) = delete;
  ~EnvironmentScope() {
    for (auto entry = before_.rbegin(); entry != before_.rend(); ++entry)
      entry->second ? setenv(entry->first.c_str(), entry->second->c_str(), 1) : unsetenv(entry->first.c_str());
  }

 private:
  std::vector<std::pair<std::string, std::optional<std::string>>> before_;
};

}  // namespace fsdp::testing
