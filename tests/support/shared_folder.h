// A folder that all ranks of a test see.
#pragma once

#include <fsdp/process_group.h>

#include <filesystem>
#include <string>

#include "comm/collectives.h"
#include "support/temp_folder.h"

namespace fsdp::testing {

// New and empty. All ranks must construct it together. It goes at the end of the run: no rank knows when the others are done with it.
class SharedFolder {
 public:
  explicit SharedFolder(const ProcessGroup& group) {
    if (group.rank() == 0) path_ = (new TempFolder)->path().string();
    path_ = group.collectives()->exchange("folder of a test", path_).front();
  }
  const std::string& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (std::filesystem::path(path_) / name).string(); }

 private:
  std::string path_;
};

}  // namespace fsdp::testing
