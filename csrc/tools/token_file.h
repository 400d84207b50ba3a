// Token ids in a file, read by position: a corpus may be larger than memory.
//
//     .txt    every byte is a token, 0 to 255
//     .bin    uint16 or uint32, little-endian; which of them stands in NAME.json beside it as {"dtype": "uint16", ...}
//
// Thread safety: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace fsdp::tools {

class TokenFile {
 public:
  // Throws c10::Error that names the file: it is missing, of another kind, or its length does not fit.
  explicit TokenFile(const std::string& path);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;
  TokenFile& operator=(const TokenFile&) = delete;

  int64_t size() const { return size_; }  // tokens
  const std::string& path() const { return path_; }

  // Writes `out.numel()` ids from `begin` on into `out`: int64, contiguous, on the CPU. REQUIRES: 0 ≤ begin ≤ size() - out.numel().
  void read(int64_t begin, at::Tensor out) const;

  // The largest id in [begin, end).
  int64_t largest(int64_t begin, int64_t end) const;

 private:
  std::string path_;
  int file_ = -1;
  int64_t width_ = 1;  // bytes a token
  int64_t size_ = 0;
};

}  // namespace fsdp::tools
