#include <fsdp/safetensors.h>

#include <ATen/ops/empty.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <set>

#include "checkpoint/file_io.h"
#include "checkpoint/json_text.h"

namespace fsdp {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little, "safetensors data are little-endian and copied as they are");

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kMostHeaderBytes = 16 << 20;  // a parsed header takes about ten times its bytes
constexpr int64_t kPieceBytes = 4 << 20;

constexpr std::array<std::pair<const char*, c10::ScalarType>, 16> kDtypes{{
    {"F32", c10::ScalarType::Float},
    {"BF16", c10::ScalarType::BFloat16},
    {"F16", c10::ScalarType::Half},
    {"F64", c10::ScalarType::Double},
    {"I64", c10::ScalarType::Long},
    {"I32", c10::ScalarType::Int},
    {"I16", c10::ScalarType::Short},
    {"I8", c10::ScalarType::Char},
    {"U8", c10::ScalarType::Byte},
    {"U16", c10::ScalarType::UInt16},
    {"U32", c10::ScalarType::UInt32},
    {"U64", c10::ScalarType::UInt64},
    {"BOOL", c10::ScalarType::Bool},
    {"C64", c10::ScalarType::ComplexFloat},
    {"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    {"F8_E5M2", c10::ScalarType::Float8_e5m2},
}};

const char* name_of(c10::ScalarType dtype, const std::string& tensor) {
  for (const auto& [name, known] : kDtypes)
    if (known == dtype) return name;
  TORCH_CHECK(false, "tensor '", tensor, "' has dtype ", dtype, ", which the safetensors format does not have");
}

// A count of elements or bytes from the header: a whole number that int64 holds.
int64_t count_in(const json& value, const std::string& where, const char* what) {
  TORCH_CHECK(value.is_number_unsigned() && value.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()), where,
              ": ", what, " must be a whole number from 0 on, got ",
              value.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 60));
  return value.get<int64_t>();
}

int64_t product(const std::vector<int64_t>& shape, int64_t element_bytes, const std::string& where) {
  int64_t bytes = element_bytes;
  for (const int64_t size : shape)
    TORCH_CHECK(!__builtin_mul_overflow(bytes, size, &bytes), where, ": the shape has more elements than fit into memory");
  return bytes;
}

SafetensorsEntry read_entry(const std::string& name, const json& value, int64_t data_begin, const std::string& path) {
  const std::string where = c10::str("'", path, "', tensor '", name.substr(0, 200), "'");
  TORCH_CHECK(
      value.is_object() && value.size() == 3 && value.contains("dtype") && value.contains("shape") && value.contains("data_offsets"), where,
      ": expected exactly dtype, shape and data_offsets");
  SafetensorsEntry entry;
  entry.name = name;
  const auto& dtype = value["dtype"];
  const auto known = std::find_if(kDtypes.begin(), kDtypes.end(),
                                  [&](const auto& each) { return dtype.is_string() && dtype.get_ref<const std::string&>() == each.first; });
  TORCH_CHECK(known != kDtypes.end(), where, ": unknown dtype ", dtype.dump(-1, ' ', true, json::error_handler_t::replace).substr(0, 60));
  entry.dtype = known->second;
  const auto& shape = value["shape"];
  TORCH_CHECK(shape.is_array() && shape.size() <= 64, where, ": shape must be a list of at most 64 sizes");
  for (const auto& size : shape) entry.shape.push_back(count_in(size, where, "a size"));
  const auto& offsets = value["data_offsets"];
  TORCH_CHECK(offsets.is_array() && offsets.size() == 2, where, ": data_offsets must be two numbers");
  const int64_t begin = count_in(offsets[0], where, "an offset"), end = count_in(offsets[1], where, "an offset");
  const int64_t bytes = product(entry.shape, static_cast<int64_t>(c10::elementSize(entry.dtype)), where);
  TORCH_CHECK(begin <= end && end - begin == bytes, where, ": shape and dtype need ", bytes, " bytes, data_offsets have ", end - begin);
  TORCH_CHECK(end <= std::numeric_limits<int64_t>::max() - data_begin, where, ": data_offsets end beyond any file");
  entry.begin = data_begin + begin;
  return entry;
}

}  // namespace

int64_t SafetensorsEntry::numel() const { return bytes() / static_cast<int64_t>(c10::elementSize(dtype)); }

int64_t SafetensorsEntry::bytes() const { return product(shape, static_cast<int64_t>(c10::elementSize(dtype)), "tensor '" + name + "'"); }

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  int64_t file_bytes = 0;
  file_ = open_regular(path, file_bytes);
  try {
    TORCH_CHECK(file_bytes >= kLengthBytes, "'", path, "' has ", file_bytes, " bytes, too few for a safetensors file");
    uint64_t length = 0;
    read_exactly(file_, path, 0, &length, sizeof length);
    TORCH_CHECK(length <= static_cast<uint64_t>(kMostHeaderBytes), "'", path, "' announces a header of ", length,
                " bytes; expected at most ", kMostHeaderBytes, ". It is no safetensors file, or damaged");
    const int64_t data_begin = kLengthBytes + static_cast<int64_t>(length);
    TORCH_CHECK(data_begin <= file_bytes, "'", path, "' announces a header of ", length, " bytes, but has only ", file_bytes,
                ": it is cut off");
    std::string text(length, '\0');
    read_exactly(file_, path, kLengthBytes, text.data(), text.size());
    TORCH_CHECK(text.starts_with('{'), "'", path, "': the header does not begin with {");
    const json header = parse_json(text, "'" + path + "': the header", 3);
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        TORCH_CHECK(value.is_object(), "'", path, "': __metadata__ must be an object of strings");
        for (const auto& [key, text_value] : value.items()) {
          TORCH_CHECK(text_value.is_string(), "'", path, "': __metadata__ must be an object of strings");
          metadata_[key] = text_value.get<std::string>();
        }
        continue;
      }
      TORCH_CHECK(!name.empty(), "'", path, "' has a tensor without a name");
      entries_.push_back(read_entry(name, value, data_begin, path));
    }
    std::sort(entries_.begin(), entries_.end(),
              [](const auto& a, const auto& b) { return std::pair(a.begin, a.bytes()) < std::pair(b.begin, b.bytes()); });
    int64_t end = data_begin;
    for (const auto& entry : entries_) {
      TORCH_CHECK(entry.begin == end, "'", path, "', tensor '", entry.name, "': its data begin at byte ", entry.begin,
                  ", those before end at ", end, entry.begin < end ? ": they overlap" : ": there is a gap");
      end += entry.bytes();
      by_name_[entry.name] = static_cast<size_t>(&entry - entries_.data());
    }
    TORCH_CHECK(end == file_bytes, "'", path, "' has ", file_bytes, " bytes, its tensors end at byte ", end,
                end > file_bytes ? ": it is cut off" : ": something follows that belongs to none");
  } catch (...) {
    ::close(file_);
    throw;
  }
}

SafetensorsFile::~SafetensorsFile() {
  if (file_ >= 0) ::close(file_);
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept { *this = std::move(other); }

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  std::swap(entries_, other.entries_);
  std::swap(by_name_, other.by_name_);
  std::swap(metadata_, other.metadata_);
  return *this;
}

const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &entries_[found->second];
}

at::Tensor SafetensorsFile::read(const std::string& name) const {
  const auto* entry = find(name);
  TORCH_CHECK(entry, "'", path_, "' has no tensor '", name, "'");
  auto tensor = at::empty(entry->shape, at::dtype(entry->dtype));
  read(*entry, 0, tensor);
  return tensor;
}

void SafetensorsFile::read(const SafetensorsEntry& entry, int64_t first, at::Tensor out) const {
  TORCH_INTERNAL_ASSERT(first >= 0 && out.numel() <= entry.numel() - first && out.device().is_cpu());
  const auto element = static_cast<int64_t>(c10::elementSize(entry.dtype));
  const int64_t begin = entry.begin + first * element;
  // A byte of a truth value may be anything in a file, and must be 0 or 1 in memory.
  const auto dtype = entry.dtype == c10::ScalarType::Bool ? c10::ScalarType::Byte : entry.dtype;
  if (out.scalar_type() == dtype && out.is_contiguous())
    return read_exactly(file_, path_, begin, out.mutable_data_ptr(), static_cast<size_t>(out.nbytes()));
  auto to = out.view({-1});
  const int64_t piece = kPieceBytes / element;
  const auto buffer = at::empty({std::min(piece, out.numel())}, at::dtype(dtype));
  for (int64_t done = 0; done < out.numel(); done += piece) {
    const int64_t count = std::min(piece, out.numel() - done);
    read_exactly(file_, path_, begin + done * element, buffer.mutable_data_ptr(), static_cast<size_t>(count * element));
    to.narrow(0, done, count).copy_(buffer.narrow(0, 0, count));
  }
}

SafetensorsWriter::SafetensorsWriter(const std::string& path, std::vector<SafetensorsEntry> entries,
                                     const std::map<std::string, std::string>& metadata)
    : path_(path), temporary_(temporary_beside(path)), entries_(std::move(entries)) {
  std::set<std::string> names;
  int64_t bytes = 0;
  for (const auto& entry : entries_) {
    TORCH_CHECK(!entry.name.empty() && entry.name != "__metadata__", "'", path, "': '", entry.name, "' cannot be the name of a tensor");
    TORCH_CHECK(names.insert(entry.name).second, "'", path, "': tensor '", entry.name, "' comes twice");
    name_of(entry.dtype, entry.name);
    bytes += entry.bytes();
  }
  check_room(path, bytes);
  file_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  TORCH_CHECK(file_ >= 0, "'", path, "' cannot be made: ", std::strerror(errno));
  try {
    write_header(metadata);
  } catch (...) {
    ::close(file_);
    ::unlink(temporary_.c_str());
    throw;
  }
}

void SafetensorsWriter::write_header(const std::map<std::string, std::string>& metadata) {
  nlohmann::ordered_json header;
  if (!metadata.empty()) header["__metadata__"] = metadata;
  int64_t end = 0;
  for (const auto& entry : entries_) {
    header[entry.name] = {
        {"dtype", name_of(entry.dtype, entry.name)}, {"shape", entry.shape}, {"data_offsets", {end, end + entry.bytes()}}};
    end += entry.bytes();
  }
  std::string text = header.is_null() ? "{}" : header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // so that the data are aligned for whoever maps the file
  const uint64_t length = text.size();
  TORCH_CHECK(length <= static_cast<uint64_t>(kMostHeaderBytes), "'", path_, "': the header would have ", length,
              " bytes; expected at most ", kMostHeaderBytes);
  write(&length, sizeof length);
  write(text.data(), text.size());
}

SafetensorsWriter::~SafetensorsWriter() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(temporary_.c_str());
}

void SafetensorsWriter::write(const void* data, size_t bytes) { write_exactly(file_, path_, data, bytes); }

void SafetensorsWriter::append(const at::Tensor& tensor) {
  TORCH_CHECK(next_ < entries_.size(), "'", path_, "': a tensor more than was announced");
  const auto& entry = entries_[next_];
  TORCH_CHECK(tensor.sizes() == at::IntArrayRef(entry.shape), "'", path_, "': tensor '", entry.name, "' was announced with shape ",
              at::IntArrayRef(entry.shape), ", got ", tensor.sizes());
  const auto values = tensor.detach().to(at::kCPU, entry.dtype).contiguous();
  write(values.const_data_ptr(), static_cast<size_t>(values.nbytes()));
  ++next_;
}

void SafetensorsWriter::finish() {
  TORCH_CHECK(next_ == entries_.size(), "'", path_, "': ", next_, " of ", entries_.size(), " tensors were written");
  publish(std::exchange(file_, -1), temporary_, path_);
}

void write_safetensors(const std::string& path, const std::vector<std::pair<std::string, at::Tensor>>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors) entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0});
  SafetensorsWriter writer(path, std::move(entries), metadata);
  for (const auto& [_, tensor] : tensors) writer.append(tensor);
  writer.finish();
}

}  // namespace fsdp
