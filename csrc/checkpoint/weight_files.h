// The files of one model: model.safetensors, or several with an index beside them.
#pragma once

#include <fsdp/safetensors.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

namespace fsdp {

struct WeightInFile {
  const SafetensorsFile* file = nullptr;
  const SafetensorsEntry* entry = nullptr;
};

class WeightFiles {
 public:
  // `path`: a folder or one .safetensors file. Throws where the index and the files do not fit each other.
  explicit WeightFiles(const std::string& path);
  const std::string& path() const { return path_; }
  const std::map<std::string, WeightInFile>& weights() const { return weights_; }  // by name

 private:
  void add(std::unique_ptr<SafetensorsFile> file);

  std::string path_;
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::map<std::string, WeightInFile> weights_;
};

// Writes them, tensor by tensor.
class WeightFilesWriter {
 public:
  // `path`: a folder, made where there is none, or the name of one .safetensors file.
  WeightFilesWriter(const std::string& path, const std::vector<SafetensorsEntry>& entries, int64_t max_file_bytes);
  void append(const at::Tensor& tensor);
  void finish();

 private:
  void open_next();

  std::string path_of(size_t file) const;

  std::string path_;
  bool is_folder_;
  std::vector<std::vector<SafetensorsEntry>> by_file_;
  std::unique_ptr<SafetensorsWriter> writer_;
  size_t file_ = 0;     // being written
  size_t in_file_ = 0;  // tensors appended to it
};

}  // namespace fsdp
