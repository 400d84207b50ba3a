#include "support/temp_folder.h"

#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <stdexcept>

namespace fsdp::testing {

namespace fs = std::filesystem;

namespace {

constexpr const char* kRunVariable = "FSDP_TEST_RUN_FOLDER";
constexpr const char* kPrefix = "fsdp_tests.";

fs::path make_unique_folder(const fs::path& parent, const std::string& prefix) {
  std::string name = (parent / (prefix + "XXXXXX")).string();
  if (!mkdtemp(name.data())) throw std::runtime_error("no folder for temporary files can be made in " + parent.string());
  return name;
}

// A run that was killed could not clean up. Its folder carries its pid: "fsdp_tests.<pid>.XXXXXX".
void remove_folders_of_dead_runs() {
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(fs::temp_directory_path(), ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.rfind(kPrefix, 0) != 0) continue;
    const int pid = std::atoi(name.c_str() + std::string(kPrefix).size());
    if (pid > 0 && kill(pid, 0) != 0 && errno == ESRCH) fs::remove_all(entry.path(), ignored);
  }
}

// One folder a run, which ranks find in their environment.
fs::path run_folder() {
  if (const char* folder = std::getenv(kRunVariable)) return folder;
  remove_folders_of_dead_runs();
  const fs::path folder = make_unique_folder(fs::temp_directory_path(), kPrefix + std::to_string(getpid()) + ".");
  setenv(kRunVariable, folder.c_str(), 1);
  return folder;
}

}  // namespace

TempFolder::TempFolder() : path_(make_unique_folder(run_folder(), "")) {}

TempFolder::~TempFolder() {
  std::error_code ignored;
  fs::remove_all(path_, ignored);
}

void remove_run_folder() {
  std::error_code ignored;
  if (const char* folder = std::getenv(kRunVariable)) fs::remove_all(folder, ignored);
}

}  // namespace fsdp::testing
