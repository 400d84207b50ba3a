#include "tools/metrics_file.h"

#include <c10/util/Exception.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>

namespace fsdp::tools {

MetricsFile::MetricsFile(const std::string& path, bool goes_on) : path_(path) {
  if (path_.empty()) return;
  TORCH_CHECK(goes_on || !std::filesystem::exists(path_), "'metrics_file': '", path_, "' exists already; move it away or name another");
  file_.open(path_, std::ios::app);
  TORCH_CHECK(file_, "'metrics_file': '", path_, "' cannot be opened: ", std::strerror(errno));
}

void MetricsFile::cut_after(int64_t step) {
  if (path_.empty()) return;
  std::string kept;
  std::ifstream before(path_);
  for (std::string line; std::getline(before, line);) {
    const auto parsed = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_object() && parsed.value("step", step + 1) <= step) kept += line + "\n";
  }
  file_.close();
  file_.open(path_, std::ios::trunc);
  file_ << kept << std::flush;
  TORCH_CHECK(file_, "'metrics_file': '", path_, "' cannot be written: ", std::strerror(errno));
}

void MetricsFile::write(const nlohmann::json& line) {
  if (path_.empty()) return;
  file_ << line.dump() << std::endl;
  TORCH_CHECK(file_, "'metrics_file': '", path_, "' cannot be written: ", std::strerror(errno));
}

}  // namespace fsdp::tools
