#include "checkpoint/manifest.h"

#include <algorithm>
#include <filesystem>
#include <limits>

#include "checkpoint/file_io.h"
#include "checkpoint/json_text.h"
#include "comm/agreement.h"

namespace fsdp {
namespace {

using nlohmann::json;

constexpr int64_t kVersion = 1;
constexpr int64_t kMostManifestBytes = 256 << 20;
constexpr int64_t kMostRanks = 1 << 20;

// One object of the manifest, every key of which must be there and be known.
class Reader {
 public:
  Reader(const json& value, std::string where, size_t keys) : value_(value), where_(std::move(where)) {
    TORCH_CHECK(value.is_object() && value.size() == keys, where_, ": expected an object with ", keys, " keys");
  }
  const json& at(const char* key) const {
    const auto found = value_.find(key);
    TORCH_CHECK(found != value_.end(), where_, " has no '", key, "'");
    return *found;
  }
  int64_t number(const char* key, int64_t most = std::numeric_limits<int64_t>::max()) const { return number_in(at(key), key, most); }
  int64_t number_in(const json& value, const char* key, int64_t most = std::numeric_limits<int64_t>::max()) const {
    TORCH_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(most), where_, ": '", key,
                "' must be a whole number from 0 to ", most);
    return value.get<int64_t>();
  }
  std::string text(const char* key) const {
    TORCH_CHECK(at(key).is_string(), where_, ": '", key, "' must be a text");
    return at(key).get<std::string>();
  }
  bool flag(const char* key) const {
    TORCH_CHECK(at(key).is_boolean(), where_, ": '", key, "' must be true or false");
    return at(key).get<bool>();
  }
  std::vector<int64_t> numbers(const char* key) const {
    TORCH_CHECK(at(key).is_array() && at(key).size() <= 64, where_, ": '", key, "' must be a list of at most 64 numbers");
    std::vector<int64_t> result;
    for (const auto& each : at(key)) result.push_back(number_in(each, key));
    return result;
  }

 private:
  const json& value_;
  std::string where_;
};

json as_json(const ManifestFile& file) { return {{"name", file.name}, {"bytes", file.bytes}, {"header_xxh3_128", file.header_hash}}; }

json as_json(const ManifestPart& part) {
  return {{"rank", part.rank}, {"begin", part.begin}, {"length", part.length}, {"xxh3_128", part.hash}};
}

ManifestFile file_from(const json& value, const std::string& where) {
  const Reader reader(value, where, 3);
  return {reader.text("name"), reader.number("bytes"), reader.text("header_xxh3_128")};
}

ManifestPart part_from(const json& value, const std::string& where) {
  const Reader reader(value, where, 4);
  return {static_cast<int>(reader.number("rank", kMostRanks)), reader.number("begin"), reader.number("length"), reader.text("xxh3_128")};
}

// The parts of a tensor must be all of it, once.
void check_parts(const ManifestTensor& tensor, int world_size, const std::string& where) {
  int64_t numel = 1;
  for (const auto size : tensor.shape) TORCH_CHECK(!__builtin_mul_overflow(numel, size, &numel), where, " has too many elements");
  if (!tensor.order.empty()) {
    auto sorted = tensor.order;
    std::sort(sorted.begin(), sorted.end());
    for (size_t i = 0; i < sorted.size(); ++i) TORCH_CHECK(sorted[i] == static_cast<int64_t>(i), where, ": 'order' is no order of dims");
    TORCH_CHECK(sorted.size() == tensor.shape.size(), where, ": 'order' and 'shape' differ in length");
  }
  int64_t end = 0;
  for (size_t i = 0; i < tensor.parts.size(); ++i) {
    const auto& part = tensor.parts[i];
    TORCH_CHECK(part.rank < world_size, where, ": rank ", part.rank, " of ", world_size);
    if (tensor.of_each_rank) {
      TORCH_CHECK(part.rank == static_cast<int>(i) && part.begin == 0 && part.length == numel, where, ": rank ", i,
                  " has another part than all of it");
    } else {
      TORCH_CHECK(part.begin == end && part.length > 0 && part.length <= numel - end, where, ": its parts overlap or have gaps at element ",
                  end);
      end += part.length;
    }
  }
  TORCH_CHECK(tensor.of_each_rank ? static_cast<int>(tensor.parts.size()) == world_size : end == numel, where, ": parts are missing");
}

}  // namespace

std::string to_text(const Manifest& manifest) {
  json content{
      {"format_version", kVersion},
      {"step", manifest.step},
      {"world_size", manifest.world_size},
      {"nonce", manifest.nonce},
      {"library_version", manifest.library_version},
      {"torch_version", manifest.torch_version},
      {"seed", manifest.seed},
      {"extra", manifest.extra},
      {"optimizer", {{"type", manifest.optimizer_type}, {"options", manifest.optimizer_options}, {"steps", manifest.optimizer_steps}}},
      {"files", json::array()},
      {"tensors", json::object()}};
  for (const auto& file : manifest.files) content["files"].push_back(as_json(file));
  for (const auto& [name, tensor] : manifest.tensors) {
    auto& entry = content["tensors"][name] = {{"dtype", tensor.dtype},
                                              {"shape", tensor.shape},
                                              {"order", tensor.order},
                                              {"of_each_rank", tensor.of_each_rank},
                                              {"parts", json::array()}};
    for (const auto& part : tensor.parts) entry["parts"].push_back(as_json(part));
  }
  const std::string text = content.dump();
  return "{\"manifest\":" + text + ",\"xxh3_128\":\"" + comm::hash_of(text) + "\"}";
}

Manifest parse_manifest(const std::string& text, const std::string& where) {
  const json document = parse_json(text, where, 16);
  const Reader outer(document, where, 2);
  const auto& content = outer.at("manifest");
  // Written by the same library from sorted keys, so byte for byte what was hashed, spaces apart.
  TORCH_CHECK(comm::hash_of(content.dump(-1, ' ', false, json::error_handler_t::replace)) == outer.text("xxh3_128"), where,
              " is damaged: its hash is another");
  TORCH_CHECK(content.is_object() && content.contains("format_version"), where, " has no 'format_version'");
  TORCH_CHECK(content["format_version"] == json(kVersion), where, " has format version ", content["format_version"].dump(),
              "; this library reads version ", kVersion, ". It was written by a later one");
  const Reader reader(content, where, 11);
  Manifest manifest;
  manifest.step = reader.number("step");
  manifest.world_size = static_cast<int>(reader.number("world_size", kMostRanks));
  manifest.nonce = reader.text("nonce");
  manifest.library_version = reader.text("library_version");
  manifest.torch_version = reader.text("torch_version");
  TORCH_CHECK(reader.at("seed").is_number_unsigned(), where, ": 'seed' must be a whole number");
  manifest.seed = reader.at("seed").get<uint64_t>();
  manifest.extra = reader.text("extra");
  const Reader optimizer(reader.at("optimizer"), where + ", optimizer", 3);
  manifest.optimizer_type = optimizer.text("type");
  manifest.optimizer_options = optimizer.text("options");
  TORCH_CHECK(optimizer.at("steps").is_object(), where, ", optimizer: 'steps' must be an object");
  for (const auto& [name, step] : optimizer.at("steps").items()) manifest.optimizer_steps[name] = optimizer.number_in(step, "steps");
  TORCH_CHECK(
      reader.at("files").is_array() && static_cast<int>(reader.at("files").size()) == manifest.world_size && manifest.world_size > 0, where,
      ": expected a file for each of ", manifest.world_size, " ranks");
  for (const auto& file : reader.at("files")) {
    manifest.files.push_back(file_from(file, where + ", files"));
    const auto& name = manifest.files.back().name;
    TORCH_CHECK(!name.empty() && name.front() != '.' && name.find_first_of(std::string("/\\\0", 3)) == name.npos, where, ": '", name,
                "' is no name of a file beside it");
  }
  TORCH_CHECK(reader.at("tensors").is_object(), where, ": 'tensors' must be an object");
  for (const auto& [name, value] : reader.at("tensors").items()) {
    const auto place = where + ", tensor '" + name + "'";
    const Reader entry(value, place, 5);
    ManifestTensor tensor{entry.text("dtype"), entry.numbers("shape"), entry.numbers("order"), entry.flag("of_each_rank"), {}};
    TORCH_CHECK(entry.at("parts").is_array(), place, ": 'parts' must be a list");
    for (const auto& part : entry.at("parts")) tensor.parts.push_back(part_from(part, place));
    check_parts(tensor, manifest.world_size, place);
    manifest.tensors.emplace(name, std::move(tensor));
  }
  return manifest;
}

Manifest read_manifest(const std::string& checkpoint) {
  const auto path = (std::filesystem::path(checkpoint) / kManifestName).string();
  return parse_manifest(read_text_file(path, kMostManifestBytes), "'" + path + "'");
}

std::string to_text(const RankReport& report) {
  json parts = json::object();
  for (const auto& [name, part] : report.parts) parts[name] = as_json(part);
  return json{{"file", as_json(report.file)}, {"parts", parts}}.dump();
}

RankReport parse_report(const std::string& text) {
  const json value = json::parse(text);
  RankReport report{file_from(value.at("file"), "a rank's report"), {}};
  for (const auto& [name, part] : value.at("parts").items()) report.parts[name] = part_from(part, "a rank's report");
  return report;
}

}  // namespace fsdp
