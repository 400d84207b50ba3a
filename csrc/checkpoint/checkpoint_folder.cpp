#include "checkpoint/checkpoint_folder.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "checkpoint/manifest.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPrefix = "step-";
constexpr const char* kMaking = ".saving-";
constexpr const char* kDeleting = ".deleting-";

std::optional<int64_t> step_of(const std::string& name) {
  const std::string digits = name.starts_with(kPrefix) ? name.substr(std::strlen(kPrefix)) : "";
  if (digits.size() < 8 || digits.size() > 18 || !std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; }))
    return std::nullopt;
  return std::stoll(digits);
}

void sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  TORCH_CHECK(folder >= 0, "'", path, "' cannot be opened: ", std::strerror(errno));
  const int result = ::fsync(folder), error = errno;
  ::close(folder);
  TORCH_CHECK(result == 0, "'", path, "' cannot be written to the disk: ", std::strerror(error));
}

// Out of sight first, so that no half of one is taken for a checkpoint.
void remove_folder(const fs::path& path) {
  const auto hidden = path.parent_path() / (kDeleting + path.filename().string());
  std::error_code error;
  fs::remove_all(hidden, error);
  fs::rename(path, hidden, error);
  if (!error) fs::remove_all(hidden, error);
}

}  // namespace

std::string checkpoint_path(const std::string& root, int64_t step) {
  char name[40];
  std::snprintf(name, sizeof name, "%s%08lld", kPrefix, static_cast<long long>(step));
  return (fs::path(root) / name).string();
}

std::string begin_checkpoint(const std::string& root, const std::string& nonce) {
  std::error_code error;
  fs::create_directories(root, error);
  TORCH_CHECK(!error, "'", root, "' cannot be made: ", error.message());
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(root)) {
    const auto name = entry.path().filename().string();
    if (name.starts_with(kMaking) || name.starts_with(kDeleting)) left.push_back(entry.path());
  }
  for (const auto& path : left) fs::remove_all(path, error);
  const auto path = fs::path(root) / (kMaking + nonce);
  TORCH_CHECK(fs::create_directory(path, error), "'", path.string(), "' cannot be made: ", error.message());
  return path.string();
}

void publish_checkpoint(const std::string& temporary, const std::string& path) {
  sync_folder(temporary);
  const auto root = fs::path(path).parent_path().string();
  if (::rename(temporary.c_str(), path.c_str()) != 0) {
    TORCH_CHECK(errno == ENOTEMPTY || errno == EEXIST, "'", path, "' cannot be put in its place: ", std::strerror(errno));
    // The two change places, so that one of them has the name at any time.
    TORCH_CHECK(::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE) == 0, "'", path,
                "' cannot be replaced: ", std::strerror(errno));
  }
  sync_folder(root);
  std::error_code ignored;
  fs::remove_all(temporary, ignored);  // what had the name before
}

std::vector<std::string> list_checkpoints(const std::string& root) {
  std::vector<std::pair<int64_t, std::string>> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(root, error)) {
    const auto step = step_of(entry.path().filename().string());
    if (step && fs::exists(entry.path() / kManifestName)) found.emplace_back(*step, entry.path().string());
  }
  std::sort(found.rbegin(), found.rend());
  std::vector<std::string> paths;
  for (auto& [_, path] : found) paths.push_back(std::move(path));
  return paths;
}

void delete_old_checkpoints(const std::string& root, int64_t keep_last, int64_t keep_every) {
  if (keep_last <= 0) return;
  const auto paths = list_checkpoints(root);
  for (size_t i = static_cast<size_t>(keep_last); i < paths.size(); ++i) {
    const int64_t step = *step_of(fs::path(paths[i]).filename().string());
    if (keep_every <= 0 || step % keep_every != 0) remove_folder(paths[i]);
  }
}

}  // namespace fsdp
