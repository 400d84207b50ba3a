// Rows of token ids to train on and validate with, from either kind of file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::tools {

constexpr int64_t kIgnored = -100;  // a target that is no part of the loss

struct Batch {
  at::Tensor ids, targets;  // (rows, seq_len) int64, memory of their own; targets[t] is what follows ids[t], or kIgnored
};

// Thread safety: one thread at a time.
class TrainingRows {
 public:
  virtual ~TrainingRows() = default;
  virtual int64_t size() const = 0;  // rows
  virtual Batch read(const std::vector<int64_t>& rows) const = 0;
  // Of a file with batches of its own, rows of each in order; 0: rows are to be drawn.
  virtual int64_t rows_in_batch() const { return 0; }
  // Throws c10::Error where an id in [begin, end) of the file's rows is no token of the vocabulary.
  virtual void check_ids(int64_t begin, int64_t end, int64_t vocab_size) const = 0;
};

// A file of tokens (token_file.h): row i begins at token i · stride and has seq_len targets. `key` is the setting that names the file.
std::unique_ptr<TrainingRows> open_windows(const std::string& path, const std::string& key, int64_t seq_len, int64_t stride);

// A .safetensors file with `input_ids` (steps, global batch, length) and, where not every id is a target, `labels` of the same shape:
// labels[t] stands beside input_ids[t], as Hugging Face's do, so a row has length - 1 targets. Row i is row i % global batch of step
// i / global batch.
std::unique_ptr<TrainingRows> open_batches(const std::string& path, const std::string& key);

}  // namespace fsdp::tools
