#include "tools/token_file.h"

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <vector>

namespace fsdp::tools {
namespace {

int64_t width_beside(const std::string& path) {
  const std::string beside = path.substr(0, path.size() - 4) + ".json";
  std::ifstream file(beside);
  TORCH_CHECK(file, "'", path, "' needs '", beside, R"(' beside it, which says how tokens are kept: {"dtype": "uint16"} or "uint32")");
  const auto json = nlohmann::json::parse(std::string{std::istreambuf_iterator<char>(file), {}}, nullptr, /*allow_exceptions=*/false);
  const std::string dtype = json.is_object() && json.contains("dtype") && json["dtype"].is_string() ? json["dtype"] : "";
  TORCH_CHECK(dtype == "uint16" || dtype == "uint32", "'", beside, R"(': expected "dtype": "uint16" or "uint32")");
  return dtype == "uint16" ? 2 : 4;
}

}  // namespace

TokenFile::TokenFile(const std::string& path) : path_(path) {
  TORCH_CHECK(path.ends_with(".txt") || path.ends_with(".bin"), "'", path, "': expected a .txt (bytes) or .bin (token ids) file");
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  TORCH_CHECK(file_ >= 0, "'", path, "' cannot be read: ", std::strerror(errno));
  try {
    struct stat facts {};
    TORCH_CHECK(::fstat(file_, &facts) == 0 && S_ISREG(facts.st_mode), "'", path, "' is no regular file");
    if (path.ends_with(".bin")) width_ = width_beside(path);
    TORCH_CHECK(facts.st_size % width_ == 0, "'", path, "' has ", facts.st_size, " bytes, which is no multiple of the ", width_,
                " that a token takes: it is cut off, or the .json beside it is another file's");
    size_ = facts.st_size / width_;
  } catch (...) {
    ::close(file_);
    throw;
  }
}

TokenFile::~TokenFile() { ::close(file_); }

void TokenFile::read(int64_t begin, at::Tensor out) const {
  const int64_t count = out.numel();
  TORCH_INTERNAL_ASSERT(begin >= 0 && count <= size_ - begin && out.is_contiguous() && out.scalar_type() == at::kLong);
  std::vector<unsigned char> bytes(static_cast<size_t>(count * width_));
  for (size_t done = 0; done < bytes.size();) {
    const auto got =
        ::pread(file_, bytes.data() + done, bytes.size() - done, static_cast<off_t>(begin * width_ + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK(got > 0, "'", path_, "' cannot be read at byte ", begin * width_ + static_cast<int64_t>(done), ": ",
                got == 0 ? "it has become shorter" : std::strerror(errno));
    done += static_cast<size_t>(got);
  }
  auto* ids = out.mutable_data_ptr<int64_t>();
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(width_)) {
    int64_t id = 0;
    for (size_t i = static_cast<size_t>(width_); i-- > 0;) id = id << 8 | bytes[at + i];
    *ids++ = id;
  }
}

int64_t TokenFile::largest(int64_t begin, int64_t end) const {
  constexpr int64_t kChunk = 1 << 20;
  int64_t result = -1;
  for (; begin < end; begin += kChunk) {
    auto ids = at::empty({std::min(kChunk, end - begin)}, at::kLong);
    read(begin, ids);
    const auto* data = ids.const_data_ptr<int64_t>();
    result = std::max(result, *std::max_element(data, data + ids.numel()));
  }
  return result;
}

}  // namespace fsdp::tools
