// One JSON object a line, written out at once, so that a reader sees every step that was made. Numbers round-trip.
#pragma once

#include <cstdint>
#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace fsdp::tools {

class MetricsFile {
 public:
  // Nothing is written where `path` is empty. Throws c10::Error when the file cannot be opened, and unless `goes_on` when it exists
  // already.
  MetricsFile(const std::string& path, bool goes_on);
  void cut_after(int64_t step);  // drops what a run wrote after the step from which it is resumed
  void write(const nlohmann::json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace fsdp::tools
