/// Tensors in files of the safetensors format: what Hugging Face's libraries write and read.
///
///     fsdp::SafetensorsFile file("model.safetensors");
///     at::Tensor ids = file.read("input_ids");
///     fsdp::write_safetensors("out.safetensors", {{"weight", weight}});
///
/// The format: 8 bytes with the header's length, little-endian; the header, a JSON object from names to dtype, shape and data_offsets; the
/// data without gaps, little-endian, row-major (https://github.com/huggingface/safetensors).
///
/// A file may come from anywhere: everything in its header is checked against the file's size before memory is taken for it, and what the
/// format does not allow is refused. Errors are c10::Error with path, byte and reason.
///
/// Thread safety: reading from any thread; a writer by one thread at a time.
#pragma once

#include <fsdp/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp {

struct SafetensorsEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Float;
  std::vector<int64_t> shape;
  int64_t begin = 0;  ///< first byte in the file

  FSDP_API int64_t numel() const;
  FSDP_API int64_t bytes() const;
};

class FSDP_API SafetensorsFile {
 public:
  /// Reads and checks the header. Throws where the file is missing, no regular file, or not what the format says: a header of more than
  /// 16 MiB, keys twice, an unknown dtype, sizes that do not fit, data that overlap, have gaps, or end before or after the file does.
  explicit SafetensorsFile(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&&) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) noexcept;

  const std::string& path() const { return path_; }
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }  ///< in the order of their data
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  const SafetensorsEntry* find(const std::string& name) const;  ///< null: there is none

  at::Tensor read(const std::string& name) const;  ///< the whole tensor, on the CPU; throws where there is none

  /// The elements [first, first + out.numel()) of `entry` in row-major order into `out`, converted to its dtype. `out` is on the CPU.
  /// Only their bytes are read, a few MB at a time. REQUIRES: `entry` is of this file.
  void read(const SafetensorsEntry& entry, int64_t first, at::Tensor out) const;

 private:
  std::string path_;
  int file_ = -1;
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, size_t> by_name_;
  std::map<std::string, std::string> metadata_;
};

/// Writes a file tensor by tensor, so that no more than one need be in memory. It appears under its name, whole and on the disk, when
/// finish() returns; before, and where an error or the destructor ends the writer, what was at that name is untouched.
class FSDP_API SafetensorsWriter {
 public:
  /// `entries`: name, dtype and shape of what will come, in that order; `begin` is ignored. Throws for an empty name or one twice, and when
  /// the file cannot be made or the disk has too little room: path, bytes wanted and free.
  SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                    const std::map<std::string, std::string>& metadata = {});
  ~SafetensorsWriter();
  SafetensorsWriter(const SafetensorsWriter&) = delete;
  SafetensorsWriter& operator=(const SafetensorsWriter&) = delete;

  void append(const at::Tensor& tensor);  ///< the next one; shape as announced, converted to the dtype announced
  void finish();                          ///< after the last

 private:
  void write(const void* data, size_t bytes);
  void write_header(const std::map<std::string, std::string>& metadata);

  std::string path_, temporary_;
  int file_ = -1;
  size_t next_ = 0;
  std::vector<SafetensorsEntry> entries_;
};

FSDP_API void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                                const std::map<std::string, std::string>& metadata = {});

}  // namespace fsdp
