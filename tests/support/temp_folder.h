// Folders for files of tests.
#pragma once

#include <filesystem>
#include <string>

namespace fsdp::testing {

// A new, empty folder, removed with everything in it at the end of the object's life, or at the end of the run where a killed rank
// owned it. Ranks that share a folder pass its path around.
class TempFolder {
 public:
  TempFolder();
  TempFolder(const TempFolder&) = delete;
  ~TempFolder();
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

// Main process, at the end.
void remove_run_folder();

}  // namespace fsdp::testing
