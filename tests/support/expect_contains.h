// Errors are held to by their text.
#pragma once

#include <initializer_list>
#include <string>

#include "support/ranks.h"

namespace fsdp::testing {

inline void expect_contains(const std::string& text, std::initializer_list<std::string> parts) {
  for (const auto& part : parts) EXPECT(text.find(part) != std::string::npos, "'" << part << "' is missing in: " << text);
}

}  // namespace fsdp::testing
