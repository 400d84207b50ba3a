// One JSON object a line, written out at once, so that a reader sees every step that was made. Numbers round-trip.
#pragma once

#include <fstream>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace fsdp::tools {

class MetricsFile {
 public:
  // Nothing is written where `path` is empty. Throws c10::Error when the file exists already or cannot be made.
  explicit MetricsFile(const std::string& path);
  void write(const nlohmann::json& line);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace fsdp::tools
