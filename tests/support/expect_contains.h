// Errors are held to by their text.
#pragma once

#include <string>
#include <vector>

#include "support/ranks.h"

namespace fsdp::testing {

inline void expect_contains(const std::string& text, const std::vector<std::string>& parts) {
  for (const auto& part : parts) EXPECT(text.find(part) != std::string::npos, "'" << part << "' is missing in: " << text);
}

}  // namespace fsdp::testing
