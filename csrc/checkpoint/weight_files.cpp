#include "checkpoint/weight_files.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <filesystem>
#include <set>

#include "checkpoint/file_io.h"
#include "checkpoint/json_text.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr int64_t kMostIndexBytes = 16 << 20;

// A file beside the index, and nothing else that a name could lead to.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name.size() <= 255 && name.find_first_of(std::string("/\\\0", 3)) == std::string::npos && name.front() != '.' &&
         name.ends_with(".safetensors");
}

std::string file_name(size_t file, size_t files) {
  if (files == 1) return kSingle;
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", file + 1, files);
  return name;
}

}  // namespace

WeightFiles::WeightFiles(const std::string& path) : path_(path) {
  const auto single = fs::path(path) / kSingle, index = fs::path(path) / kIndex;
  if (!fs::is_directory(path) || fs::exists(single)) {
    add(std::make_unique<SafetensorsFile>(fs::is_directory(path) ? single.string() : path));
    return;
  }
  TORCH_CHECK(fs::exists(index), "'", path, "' has neither ", kSingle, " nor ", kIndex);
  const std::string where = c10::str("'", index.string(), "'");
  const json content = parse_json(read_text_file(index.string(), kMostIndexBytes), where, 4);
  TORCH_CHECK(content.is_object() && content.contains("weight_map") && content["weight_map"].is_object(), where,
              ": expected an object 'weight_map'");
  std::map<std::string, std::string> file_of;
  std::set<std::string> names;
  for (const auto& [weight, name] : content["weight_map"].items()) {
    TORCH_CHECK(name.is_string() && is_plain_name(name.get_ref<const std::string&>()), where, ": weight '", weight,
                "' must be in a .safetensors file of the same folder");
    file_of[weight] = name;
    names.insert(name.get<std::string>());
  }
  for (const auto& name : names) add(std::make_unique<SafetensorsFile>((fs::path(path) / name).string()));
  for (const auto& [weight, name] : file_of) {
    const auto found = weights_.find(weight);
    TORCH_CHECK(found != weights_.end() && fs::path(found->second.file->path()).filename() == name, where, ": weight '", weight,
                "' is not in '", name, "'");
  }
}

void WeightFiles::add(std::unique_ptr<SafetensorsFile> file) {
  for (const auto& entry : file->entries()) {
    const auto [known, is_new] = weights_.try_emplace(entry.name, WeightInFile{file.get(), &entry});
    TORCH_CHECK(is_new, "weight '", entry.name, "' is in '", known->second.file->path(), "' and in '", file->path(), "'");
  }
  files_.push_back(std::move(file));
}

WeightFilesWriter::WeightFilesWriter(const std::string& path, const std::vector<SafetensorsEntry>& entries, int64_t max_file_bytes)
    : path_(path), is_folder_(!path.ends_with(".safetensors")) {
  TORCH_CHECK(max_file_bytes > 0, "max_file_bytes must be positive, got ", max_file_bytes);
  std::error_code error;
  if (is_folder_) fs::create_directories(path, error);
  TORCH_CHECK(!error, "'", path, "' cannot be made: ", error.message());
  int64_t bytes = 0, all = 0;
  by_file_.emplace_back();
  for (const auto& entry : entries) {
    if (is_folder_ && bytes > 0 && bytes + entry.bytes() > max_file_bytes) {
      by_file_.emplace_back();
      bytes = 0;
    }
    by_file_.back().push_back(entry);
    bytes += entry.bytes();
    all += entry.bytes();
  }
  check_room(path_of(0), all);
  // Files of another save may be here under the same names: without their index they are nobody's, and never half of each.
  if (by_file_.size() > 1) fs::remove(fs::path(path) / kIndex);
  open_next();
}

std::string WeightFilesWriter::path_of(size_t file) const {
  return is_folder_ ? (fs::path(path_) / file_name(file, by_file_.size())).string() : path_;
}

void WeightFilesWriter::open_next() {
  writer_ = std::make_unique<SafetensorsWriter>(path_of(file_), by_file_[file_], std::map<std::string, std::string>{{"format", "pt"}});
  in_file_ = 0;
}

void WeightFilesWriter::append(const at::Tensor& tensor) {
  if (in_file_ == by_file_[file_].size()) {
    writer_->finish();
    ++file_;
    open_next();
  }
  writer_->append(tensor);
  ++in_file_;
}

void WeightFilesWriter::finish() {
  writer_->finish();
  if (!is_folder_) return;
  const auto index = fs::path(path_) / kIndex;
  std::error_code ignored;
  if (by_file_.size() == 1) {
    fs::remove(index, ignored);  // of other files that were here
    return;
  }
  nlohmann::ordered_json content;
  int64_t bytes = 0;
  auto& map = content["weight_map"];
  for (size_t file = 0; file < by_file_.size(); ++file)
    for (const auto& entry : by_file_[file]) {
      map[entry.name] = file_name(file, by_file_.size());
      bytes += entry.bytes();
    }
  content["metadata"] = {{"total_size", bytes}};
  write_text_file(index.string(), content.dump(2) + "\n");
  fs::remove(fs::path(path_) / kSingle, ignored);
}

}  // namespace fsdp
