// One object of a configuration, read strictly: every key is asked for once, has the type that is asked for, and none is left over.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

namespace fsdp::models {

class JsonSection {
 public:
  // `path` is the full name of the object in messages, empty for the whole file. Throws c10::Error when `json` is no object.
  JsonSection(const nlohmann::json& json, std::string path);

  std::string name_of(const std::string& key) const { return path_.empty() ? key : path_ + "." + key; }

  // Nothing where the key is missing or null.
  template <class T>
  std::optional<T> take(const std::string& key) {
    const auto* value = find(key);
    if (!value) return std::nullopt;
    bool fits = false;
    if constexpr (std::is_same_v<T, bool>)
      fits = value->is_boolean();
    else if constexpr (std::is_integral_v<T>)
      fits = value->is_number_integer();
    else if constexpr (std::is_floating_point_v<T>)
      fits = value->is_number();
    else if constexpr (std::is_same_v<T, std::string>)
      fits = value->is_string();
    else if constexpr (std::is_same_v<T, std::vector<std::string>>)
      fits = value->is_array() && std::all_of(value->begin(), value->end(), [](const auto& each) { return each.is_string(); });
    else if constexpr (std::is_same_v<T, std::vector<double>>)
      fits = value->is_array() && std::all_of(value->begin(), value->end(), [](const auto& each) { return each.is_number(); });
    TORCH_CHECK(fits, "'", name_of(key), "': expected ", kind_of<T>(), ", got ", value->dump());
    return value->get<T>();
  }

  template <class T>
  T take_or(const std::string& key, T otherwise) {
    return take<T>(key).value_or(std::move(otherwise));
  }

  std::optional<JsonSection> take_section(const std::string& key);
  const nlohmann::json* take_json(const std::string& key) { return find(key); }

  // Throws c10::Error, naming them, when keys are left that nobody asked for.
  void refuse_rest() const;

 private:
  template <class T>
  static const char* kind_of() {
    if constexpr (std::is_same_v<T, bool>)
      return "true or false";
    else if constexpr (std::is_integral_v<T>)
      return "a whole number";
    else if constexpr (std::is_floating_point_v<T>)
      return "a number";
    else if constexpr (std::is_same_v<T, std::string>)
      return "a string";
    else if constexpr (std::is_same_v<T, std::vector<double>>)
      return "a list of numbers";
    else
      return "a list of strings";
  }
  const nlohmann::json* find(const std::string& key);

  const nlohmann::json* json_;
  std::string path_;
  std::set<std::string> asked_;
};

}  // namespace fsdp::models
