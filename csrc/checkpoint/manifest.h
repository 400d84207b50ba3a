// What a checkpoint's manifest.json says. The format is docs/design/checkpoint_format.md.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fsdp {

// A piece of a tensor in one rank's file: the elements [begin, begin + length) in the tensor's memory order.
struct ManifestPart {
  int rank = 0;
  int64_t begin = 0, length = 0;
  std::string hash;  // of its bytes
};

struct ManifestTensor {
  std::string dtype;                // as safetensors has it
  std::vector<int64_t> shape;       // whole
  std::vector<int64_t> order;       // dims by falling stride; empty: as usual
  bool of_each_rank = false;        // every rank has one of its own, of this shape
  std::vector<ManifestPart> parts;  // by begin and rank
};

struct ManifestFile {
  std::string name;
  int64_t bytes = 0;
  std::string header_hash;  // of everything before the tensors' data
};

struct Manifest {
  int64_t step = 0;
  int world_size = 0;
  std::string nonce;  // alike in all that one save wrote
  std::string library_version, torch_version;
  uint64_t seed = 0;  // of rank 0's random generator
  std::string extra;
  std::string optimizer_type, optimizer_options;  // "" where none was saved; JSON text
  std::map<std::string, int64_t> optimizer_steps;
  std::vector<ManifestFile> files;  // by rank
  std::map<std::string, ManifestTensor> tensors;
};

constexpr const char* kManifestName = "manifest.json";

std::string to_text(const Manifest& manifest);
// Throws c10::Error that begins with `where`: what is damaged, of a later version, or contradicts itself.
Manifest parse_manifest(const std::string& text, const std::string& where);
Manifest read_manifest(const std::string& checkpoint);

// This rank's part of a manifest, for rank 0 to put together.
struct RankReport {
  ManifestFile file;
  std::map<std::string, ManifestPart> parts;
};
std::string to_text(const RankReport& report);
RankReport parse_report(const std::string& text);

}  // namespace fsdp
