#include "models/json_section.h"

namespace fsdp::models {

JsonSection::JsonSection(const nlohmann::json& json, std::string path) : json_(&json), path_(std::move(path)) {
  TORCH_CHECK(json.is_object(), path_.empty() ? "the configuration" : "'" + path_ + "'", ": expected an object, got ", json.dump());
}

const nlohmann::json* JsonSection::find(const std::string& key) {
  asked_.insert(key);
  const auto found = json_->find(key);
  return found == json_->end() || found->is_null() ? nullptr : &*found;
}

std::optional<JsonSection> JsonSection::take_section(const std::string& key) {
  const auto* value = find(key);
  if (!value) return std::nullopt;
  return JsonSection(*value, name_of(key));
}

void JsonSection::refuse_rest() const {
  std::string unknown, known;
  for (const auto& [key, value] : json_->items())
    if (!value.is_null() && !asked_.contains(key)) unknown += (unknown.empty() ? "'" : ", '") + name_of(key) + "'";
  for (const auto& key : asked_) known += (known.empty() ? "" : ", ") + key;
  TORCH_CHECK(unknown.empty(), "not understood: ", unknown, ". ", path_.empty() ? "The configuration" : "'" + path_ + "'",
              " may have: ", known);
}

}  // namespace fsdp::models
