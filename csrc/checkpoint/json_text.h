// JSON from files that may come from anywhere.
#pragma once

#include <c10/util/Exception.h>

#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp {

// Throws c10::Error that begins with `where`: text that is no JSON, has a key twice in an object, or is nested deeper than `depth`.
inline nlohmann::json parse_json(std::string_view text, const std::string& where, int depth) {
  using nlohmann::json;
  TORCH_CHECK(text.find('\0') == text.npos, where, " is no JSON: it has a zero byte");  // where the parser would take it to end
  std::vector<std::set<std::string>> keys;
  const auto check = [&](int level, json::parse_event_t event, json& parsed) {
    TORCH_CHECK(level <= depth, where, " is nested deeper than ", depth, " levels");
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key)
      TORCH_CHECK(keys.back().insert(parsed.get<std::string>()).second, where, " has the key ",
                  parsed.dump(-1, ' ', true, json::error_handler_t::replace), " twice");
    return true;
  };
  try {
    return json::parse(text, check, true, /*ignore_comments=*/false);
  } catch (const json::exception& error) {
    TORCH_CHECK(false, where, " is no JSON: ", error.what());
  }
}

}  // namespace fsdp
