#include "tools/metrics_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace fsdp::tools {

MetricsFile::MetricsFile(const std::string& path) : path_(path) {
  if (path_.empty()) return;
  TORCH_CHECK(!std::filesystem::exists(path_), "'metrics_file': '", path_, "' exists already; move it away or name another");
  file_.open(path_);
  TORCH_CHECK(file_, "'metrics_file': '", path_, "' cannot be made: ", std::strerror(errno));
}

void MetricsFile::write(const nlohmann::json& line) {
  if (path_.empty()) return;
  file_ << line.dump() << std::endl;
  TORCH_CHECK(file_, "'metrics_file': '", path_, "' cannot be written: ", std::strerror(errno));
}

}  // namespace fsdp::tools
