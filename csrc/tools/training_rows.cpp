#include "tools/training_rows.h"

#include <ATen/ops/empty.h>
#include <fsdp/safetensors.h>

#include <algorithm>

#include "tools/token_file.h"

namespace fsdp::tools {
namespace {

class Windows final : public TrainingRows {
 public:
  Windows(const std::string& path, std::string key, int64_t seq_len, int64_t stride)
      : file_(path), key_(std::move(key)), seq_len_(seq_len), stride_(stride) {
    TORCH_CHECK(file_.size() > seq_len, "'", key_, "': '", path, "' has ", file_.size(), " tokens; a row of data.seq_len = ", seq_len,
                " targets takes ", seq_len + 1);
  }

  int64_t size() const override { return (file_.size() - seq_len_ - 1) / stride_ + 1; }

  Batch read(const std::vector<int64_t>& rows) const override {
    auto windows = at::empty({static_cast<int64_t>(rows.size()), seq_len_ + 1}, at::kLong);
    for (size_t i = 0; i < rows.size(); ++i) file_.read(rows[i] * stride_, windows[static_cast<int64_t>(i)]);
    return {windows.narrow(1, 0, seq_len_).clone(), windows.narrow(1, 1, seq_len_).clone()};
  }

  void check_ids(int64_t begin, int64_t end, int64_t vocab_size) const override {
    const int64_t to = end == size() ? file_.size() : end * stride_;
    const auto largest = file_.largest(begin * stride_, to);
    TORCH_CHECK(largest < vocab_size, "'", key_, "': '", file_.path(), "' has the token id ", largest, ", the model's ids end at ",
                vocab_size - 1, " (vocab_size)");
  }

 private:
  TokenFile file_;
  std::string key_;
  int64_t seq_len_, stride_;
};

class Batches final : public TrainingRows {
 public:
  Batches(const std::string& path, std::string key) : file_(path), key_(std::move(key)) {
    const auto find = [&](const char* name) {
      const auto* entry = file_.find(name);
      TORCH_CHECK(!entry || entry->dtype == at::kLong || entry->dtype == at::kInt, title(), name, " must be int64 or int32, got ",
                  entry->dtype);
      return entry;
    };
    ids_ = find("input_ids");
    labels_ = find("labels");
    TORCH_CHECK(ids_, title(), "expected a tensor 'input_ids' of shape (steps, global batch, length)");
    TORCH_CHECK(ids_->shape.size() == 3 && ids_->shape[0] > 0 && ids_->shape[1] > 0 && ids_->shape[2] > 1, title(),
                "'input_ids' must be (steps, global batch, length) with length at least 2, got ", at::IntArrayRef(ids_->shape));
    TORCH_CHECK(!labels_ || labels_->shape == ids_->shape, title(), "'labels' must have the shape of 'input_ids', ",
                at::IntArrayRef(ids_->shape), ", got ", at::IntArrayRef(labels_->shape));
    for (const auto& entry : file_.entries())
      TORCH_CHECK(&entry == ids_ || &entry == labels_, title(), "has a tensor '", entry.name, "'; only 'input_ids' and 'labels' are known");
  }

  int64_t size() const override { return ids_->shape[0] * ids_->shape[1]; }
  int64_t rows_in_batch() const override { return ids_->shape[1]; }

  Batch read(const std::vector<int64_t>& rows) const override {
    const int64_t length = ids_->shape[2];
    auto ids = at::empty({static_cast<int64_t>(rows.size()), length}, at::kLong);
    auto labels = at::empty(ids.sizes(), at::kLong);
    for (size_t i = 0; i < rows.size(); ++i) {
      file_.read(*ids_, rows[i] * length, ids[static_cast<int64_t>(i)]);
      if (labels_) file_.read(*labels_, rows[i] * length, labels[static_cast<int64_t>(i)]);
    }
    return {ids.narrow(1, 0, length - 1).clone(), (labels_ ? labels : ids).narrow(1, 1, length - 1).clone()};
  }

  void check_ids(int64_t begin, int64_t end, int64_t vocab_size) const override {
    constexpr int64_t kPiece = 1 << 18;
    for (const auto* entry : {ids_, labels_}) {
      if (!entry) continue;
      const int64_t length = ids_->shape[2];
      for (int64_t at = begin * length; at < end * length; at += kPiece) {
        auto piece = at::empty({std::min(kPiece, end * length - at)}, at::kLong);
        file_.read(*entry, at, piece);
        const auto* data = piece.const_data_ptr<int64_t>();
        const auto* wrong = std::find_if(data, data + piece.numel(),
                                         [&](int64_t id) { return id >= vocab_size || (id < 0 && !(entry == labels_ && id == kIgnored)); });
        TORCH_CHECK(wrong == data + piece.numel(), title(), entry->name, " has the token id ", *wrong, ", the model's ids are 0 to ",
                    vocab_size - 1, " (vocab_size)", entry == labels_ ? ", and -100 for no target" : "");
      }
    }
  }

 private:
  std::string title() const { return c10::str("'", key_, "': '", file_.path(), "': "); }

  SafetensorsFile file_;
  std::string key_;
  const SafetensorsEntry* ids_ = nullptr;
  const SafetensorsEntry* labels_ = nullptr;  // null: the ids
};

}  // namespace

std::unique_ptr<TrainingRows> open_windows(const std::string& path, const std::string& key, int64_t seq_len, int64_t stride) {
  return std::make_unique<Windows>(path, key, seq_len, stride);
}

std::unique_ptr<TrainingRows> open_batches(const std::string& path, const std::string& key) { return std::make_unique<Batches>(path, key); }

}  // namespace fsdp::tools
