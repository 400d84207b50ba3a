// What is written is read again; what is no safetensors file, by accident or on purpose, is refused by name, soon and in little memory.
#include <fsdp/safetensors.h>
#include <sys/stat.h>
#include <torch/torch.h>

#include <catch2/catch_all.hpp>
#include <chrono>
#include <cstring>
#include <fstream>

#include "support/temp_folder.h"

namespace {

using Catch::Matchers::ContainsSubstring;
using fsdp::SafetensorsEntry;
using fsdp::SafetensorsFile;
using fsdp::SafetensorsWriter;
using fsdp::write_safetensors;
using fsdp::testing::TempFolder;

void write_bytes(const std::filesystem::path& path, const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; }

std::string bytes_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string announcing(uint64_t length, const std::string& rest) {
  std::string bytes(sizeof length, '\0');
  std::memcpy(bytes.data(), &length, sizeof length);
  return bytes + rest;
}

std::string with_header(const std::string& header, size_t data_bytes = 0) {
  return announcing(header.size(), header + std::string(data_bytes, '\1'));
}

std::string tensor(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}

std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":)" + tensor(dtype, shape, offsets) + "}";
}

std::string two(const std::string& first_offsets, const std::string& second_offsets) {
  return R"({"a":)" + tensor("\"U8\"", "[4]", first_offsets) + R"(,"b":)" + tensor("\"U8\"", "[4]", second_offsets) + "}";
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

// Everything in it, so that a wrong size anywhere would be touched.
void read_all(const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  for (const auto& entry : file.entries()) file.read(entry.name).to(torch::kDouble).sum();
}

int64_t peak_resident_kb() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6));
  FAIL("/proc/self/status has no VmHWM");
  return 0;
}

struct Hostile {
  const char* what;
  std::string bytes;
  const char* expected;
};

std::string repeated(const std::string& text, int count) {
  std::string result;
  for (int i = 0; i < count; ++i) result += text;
  return result;
}

std::vector<Hostile> hostile_files() {
  const std::string u8 = "\"U8\"";
  return {
      {"nothing", "", "too few"},
      {"seven bytes", "1234567", "too few"},
      {"no header", announcing(0, ""), "does not begin with {"},
      {"a header of 2^63 bytes", announcing(uint64_t{1} << 63, "{}"), "expected at most"},
      {"a header of 2^64 - 1 bytes", announcing(~uint64_t{0}, "{}"), "expected at most"},
      {"a header of 16 MiB and a byte", announcing((16 << 20) + 1, "{}"), "expected at most"},
      {"a header of 16 MiB that is not there", announcing(16 << 20, "{}"), "cut off"},
      {"a header a byte longer than the file", announcing(3, "{}"), "cut off"},
      {"a pickle's zip", std::string("PK\3\4\0\0\0\0\0\0archive/data.pkl", 26), "expected at most"},
      {"an ELF file", "\177ELF\2\1\1" + std::string(64, 'x'), "expected at most"},
      {"text", "The quick brown fox jumps over the lazy dog", "expected at most"},
      {"a list", with_header("[]"), "does not begin with {"},
      {"null", with_header("null"), "does not begin with {"},
      {"a space first", with_header(" {}"), "does not begin with {"},
      {"a byte order mark first", with_header("\xef\xbb\xbf{}"), "does not begin with {"},
      {"an object without an end", with_header("{\"a\":"), "no JSON"},
      {"something after the object", with_header("{}x"), "no JSON"},
      {"a second object", with_header("{}{}"), "no JSON"},
      {"zeros after the object", with_header(std::string("{}\0\0", 4)), "no JSON"},
      {"bytes that are no UTF-8", with_header("{\"\xff\xfe\":1}"), "no JSON"},
      {"single quotes", with_header("{'a':1}"), "no JSON"},
      {"a comma at the end", with_header("{\"a\":1,}"), "no JSON"},
      {"a comment", with_header("{/* */}"), "no JSON"},
      {"NaN", with_header("{\"a\":NaN}"), "no JSON"},
      {"objects in objects", with_header(repeated("{\"a\":", 100'000) + "1" + repeated("}", 100'000)), "nested deeper"},
      {"lists in lists", with_header("{\"a\":" + repeated("[", 1'000'000) + repeated("]", 1'000'000) + "}"), "nested deeper"},
      {"lists without an end", with_header("{\"a\":" + repeated("[", 1'000'000)), "nested deeper"},
      {"a name twice", with_header(R"({"a":)" + tensor(u8, "[1]", "[0,1]") + R"(,"a":)" + tensor(u8, "[1]", "[1,2]") + "}", 2), "twice"},
      {"a name twice, one spelt otherwise", with_header(R"({"a":1,"\u0061":1})"), "twice"},
      {"dtype twice", with_header(R"({"a":{"dtype":"U8","dtype":"F64","shape":[1],"data_offsets":[0,1]}})", 1), "twice"},
      {"a number for a tensor", with_header(R"({"a":1})"), "exactly dtype, shape and data_offsets"},
      {"a list for a tensor", with_header(R"({"a":["U8",[1],[0,1]]})", 1), "exactly dtype, shape and data_offsets"},
      {"no dtype", with_header(R"({"a":{"shape":[1],"data_offsets":[0,1]}})", 1), "exactly dtype, shape and data_offsets"},
      {"no shape", with_header(R"({"a":{"dtype":"U8","data_offsets":[0,1]}})", 1), "exactly dtype, shape and data_offsets"},
      {"no offsets", with_header(R"({"a":{"dtype":"U8","shape":[1]}})", 1), "exactly dtype, shape and data_offsets"},
      {"a field more", with_header(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":0}})", 1), "exactly dtype"},
      {"a number for a dtype", with_header(one("8", "[1]", "[0,1]"), 1), "unknown dtype 8"},
      {"null for a dtype", with_header(one("null", "[1]", "[0,1]"), 1), "unknown dtype null"},
      {"a dtype that is none", with_header(one("\"F31\"", "[1]", "[0,1]"), 1), "unknown dtype \"F31\""},
      {"a dtype in small letters", with_header(one("\"u8\"", "[1]", "[0,1]"), 1), "unknown dtype \"u8\""},
      {"a dtype of 1 MB", with_header(one("\"" + std::string(1'000'000, 'F') + "\"", "[1]", "[0,1]"), 1), "unknown dtype"},
      {"a number for a shape", with_header(one(u8, "1", "[0,1]"), 1), "a list of at most 64"},
      {"an object for a shape", with_header(one(u8, "{}", "[0,1]"), 1), "a list of at most 64"},
      {"65 dimensions", with_header(one(u8, "[1" + repeated(",1", 64) + "]", "[0,1]"), 1), "a list of at most 64"},
      {"a negative size", with_header(one(u8, "[-1]", "[0,1]"), 1), "whole number"},
      {"two negative sizes", with_header(one(u8, "[-1,-1]", "[0,1]"), 1), "whole number"},
      {"half an element", with_header(one(u8, "[0.5]", "[0,1]"), 1), "whole number"},
      {"a size as a fraction", with_header(one(u8, "[1.0]", "[0,1]"), 1), "whole number"},
      {"a size as text", with_header(one(u8, "[\"1\"]", "[0,1]"), 1), "whole number"},
      {"a size of true", with_header(one(u8, "[true]", "[0,1]"), 1), "whole number"},
      {"a size of 2^63", with_header(one(u8, "[9223372036854775808]", "[0,1]"), 1), "whole number"},
      {"a size of 2^64 + 1", with_header(one(u8, "[18446744073709551617]", "[0,1]"), 1), "whole number"},
      {"2^64 elements", with_header(one(u8, "[4294967296,4294967296]", "[0,0]")), "more elements than fit"},
      {"2^64 + 4 bytes", with_header(one("\"F32\"", "[4611686018427387905]", "[0,4]"), 4), "more elements than fit"},
      {"2^62 doubles", with_header(one("\"F64\"", "[4611686018427387904]", "[0,0]")), "more elements than fit"},
      {"2^62 bytes", with_header(one(u8, "[4611686018427387904]", "[0,4611686018427387904]"), 8), "cut off"},
      {"2^63 - 1 bytes", with_header(one(u8, "[9223372036854775807]", "[0,9223372036854775807]"), 8), "beyond any file"},
      {"one offset", with_header(one(u8, "[1]", "[0]"), 1), "two numbers"},
      {"three offsets", with_header(one(u8, "[1]", "[0,1,2]"), 1), "two numbers"},
      {"an object for offsets", with_header(one(u8, "[1]", R"({"0":0,"1":1})"), 1), "two numbers"},
      {"a negative offset", with_header(one(u8, "[2]", "[-1,1]"), 1), "whole number"},
      {"an offset as a fraction", with_header(one(u8, "[1]", "[0.0,1.0]"), 1), "whole number"},
      {"offsets backwards", with_header(one(u8, "[1]", "[1,0]"), 1), "need 1 bytes, data_offsets have -1"},
      {"fewer bytes than the shape", with_header(one("\"F32\"", "[2]", "[0,4]"), 4), "need 8 bytes, data_offsets have 4"},
      {"more bytes than the shape", with_header(one("\"F32\"", "[1]", "[0,8]"), 8), "need 4 bytes, data_offsets have 8"},
      {"data beyond the file", with_header(one(u8, "[9]", "[0,9]"), 8), "cut off"},
      {"data that begin beyond the file", with_header(one(u8, "[1]", "[8,9]"), 1), "gap"},
      {"an empty tensor beyond the file", with_header(one(u8, "[0]", "[99,99]")), "gap"},
      {"two tensors in one place", with_header(two("[0,4]", "[0,4]"), 4), "overlap"},
      {"tensors that overlap", with_header(two("[0,4]", "[2,6]"), 6), "overlap"},
      {"a gap between tensors", with_header(two("[0,4]", "[5,9]"), 9), "gap"},
      {"a gap before the first", with_header(two("[1,5]", "[5,9]"), 9), "gap"},
      {"bytes that belong to none", with_header(two("[0,4]", "[4,8]"), 9), "belongs to none"},
      {"data and no tensors", with_header("{}", 1), "belongs to none"},
      {"metadata as a list", with_header(R"({"__metadata__":[]})"), "object of strings"},
      {"metadata with a number", with_header(R"({"__metadata__":{"a":1}})"), "object of strings"},
      {"metadata in metadata", with_header(R"({"__metadata__":{"a":{"b":"c"}}})"), "object of strings"},
      {"a tensor without a name", with_header(R"({"":)" + tensor(u8, "[1]", "[0,1]") + "}", 1), "without a name"},
  };
}

}  // namespace

TEST_CASE("every dtype and shape comes back as it was written", "[checkpoint][safetensors][quick]") {
  const TempFolder folder;
  const auto path = folder / "a.safetensors";
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kHalf, torch::kBFloat16, torch::kLong, torch::kInt, torch::kShort, torch::kChar, torch::kByte,
        torch::kUInt16, torch::kUInt32, torch::kUInt64, torch::kBool, torch::kComplexFloat, torch::kFloat8_e4m3fn, torch::kFloat8_e5m2})
    tensors.emplace_back(c10::toString(dtype), torch::arange(-3, 3).view({2, 3}).abs().to(dtype));
  tensors.emplace_back("a scalar", torch::tensor(2.5));
  tensors.emplace_back("empty", torch::empty({0, 4}));
  tensors.emplace_back("transposed", torch::arange(6.f).view({2, 3}).t());
  tensors.emplace_back("\"quoted\\ \n\u00e9", torch::ones({1}));
  write_safetensors(path, tensors, {{"format", "pt"}});

  const SafetensorsFile file(path);
  CHECK(file.metadata() == std::map<std::string, std::string>{{"format", "pt"}});
  REQUIRE(file.entries().size() == tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [name, tensor] = tensors[i];
    INFO(name);
    CHECK(file.entries()[i].name == name);
    const auto back = file.read(name);
    CHECK(back.sizes() == tensor.sizes());
    CHECK(back.scalar_type() == tensor.scalar_type());
    const auto expected = tensor.contiguous();
    CHECK(std::memcmp(back.const_data_ptr(), expected.const_data_ptr(), expected.nbytes()) == 0);
  }
  CHECK(file.find("none") == nullptr);
  CHECK_THAT(error_of([&] { file.read("none"); }), ContainsSubstring("no tensor 'none'"));
}

TEST_CASE("a part of a tensor is read and converted", "[checkpoint][safetensors][quick]") {
  const TempFolder folder;
  const int64_t many = 2'200'000;  // several pieces
  write_safetensors(folder / "a.safetensors", {{"x", torch::ones({3}, torch::kByte)}, {"w", torch::arange(many, torch::kInt)}});
  const SafetensorsFile file(folder / "a.safetensors");
  for (const int64_t first : {int64_t{0}, int64_t{17}, many - 5}) {
    for (const int64_t count : {int64_t{0}, int64_t{5}, many - first}) {
      const auto expected = torch::arange(first, first + count, torch::kDouble);
      auto same = torch::empty({count}, torch::kInt), other = torch::empty({count}, torch::kDouble),
           apart = torch::empty({count, 2}, torch::kDouble);
      file.read(*file.find("w"), first, same);
      file.read(*file.find("w"), first, other);
      CHECK(torch::equal(same.to(torch::kDouble), expected));
      CHECK(torch::equal(other, expected));
    }
  }
}

TEST_CASE("a byte of a truth value that is neither 0 nor 1 is true", "[checkpoint][safetensors][quick]") {
  const TempFolder folder;
  write_bytes(folder / "a.safetensors", with_header(one("\"BOOL\"", "[3]", "[0,3]")) + std::string("\0\1\x2f", 3));
  const auto values = SafetensorsFile(folder / "a.safetensors").read("a");
  CHECK(torch::equal(values.view(torch::kByte), torch::tensor({0, 1, 1}, torch::kByte)));
}

TEST_CASE("a file appears whole or not at all", "[checkpoint][safetensors][quick]") {
  const TempFolder folder;
  const auto path = folder / "a.safetensors";
  const auto entries = std::vector<SafetensorsEntry>{{"a", torch::kFloat, {2}}, {"b", torch::kHalf, {3}}};
  const auto files = [&] { return std::distance(std::filesystem::directory_iterator(folder.path()), {}); };
  {
    SafetensorsWriter writer(path, entries);
    writer.append(torch::ones({2}));
    CHECK_FALSE(std::filesystem::exists(path));
  }
  CHECK(files() == 0);
  write_safetensors(path, {{"old", torch::ones({1})}});
  const std::string old = bytes_of(path);
  {
    SafetensorsWriter writer(path, entries);
    CHECK_THAT(error_of([&] { writer.append(torch::ones({3})); }), ContainsSubstring("'a' was announced with shape [2], got [3]"));
    writer.append(torch::ones({2}, torch::kDouble));
    CHECK_THAT(error_of([&] { writer.finish(); }), ContainsSubstring("1 of 2 tensors"));
    writer.append(torch::ones({3}));
    CHECK_THAT(error_of([&] { writer.append(torch::ones({3})); }), ContainsSubstring("more than was announced"));
    CHECK(bytes_of(path) == old);
    writer.finish();
  }
  CHECK(SafetensorsFile(path).read("b").scalar_type() == torch::kHalf);
  CHECK(files() == 1);
  CHECK_THAT(error_of([&] { write_safetensors(folder / "none" / "a.safetensors", {}); }), ContainsSubstring("none/a.safetensors"));
  CHECK_THAT(error_of([&] { write_safetensors(path, {{"", torch::ones({1})}}); }), ContainsSubstring("cannot be the name"));
  CHECK_THAT(error_of([&] { write_safetensors(path, {{"a", torch::ones({1})}, {"a", torch::ones({1})}}); }), ContainsSubstring("twice"));
  CHECK_THAT(error_of([&] { write_safetensors(path, {{"c", torch::ones({1}, torch::kComplexDouble)}}); }), ContainsSubstring("dtype"));
  CHECK_THAT(error_of([&] {
               SafetensorsWriter(path, {{"a", torch::kByte, {int64_t{1} << 60}}});
             }),
             ContainsSubstring("needs 1152921504606846976 bytes") && ContainsSubstring("nothing was written"));
  CHECK(files() == 1);
}

TEST_CASE("hostile files are refused by name, soon, in little memory", "[checkpoint][safetensors][hostile][quick]") {
  const TempFolder folder;
  const auto files = hostile_files();
  CHECK(files.size() >= 60);
  for (const auto& file : files) {
    INFO(file.what);
    const auto path = folder / "hostile.safetensors";
    write_bytes(path, file.bytes);
    const auto before = peak_resident_kb();
    const auto started = std::chrono::steady_clock::now();
    const auto error = error_of([&] { read_all(path); });
    CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(1));
    CHECK(peak_resident_kb() - before < static_cast<int64_t>(file.bytes.size() >> 10) + (256 << 10));
    CHECK_THAT(error, ContainsSubstring(file.expected) && ContainsSubstring("hostile.safetensors"));
    CHECK(error.size() < 2000);
  }
}

TEST_CASE("what is no regular file is refused", "[checkpoint][safetensors][hostile][quick]") {
  const TempFolder folder;
  REQUIRE(::mkfifo((folder / "fifo").c_str(), 0600) == 0);
  std::filesystem::create_symlink(folder / "nowhere", folder / "dangling");
  std::filesystem::create_symlink(folder / "circle", folder / "circle");
  for (const auto& path : {(folder / "fifo").string(), folder.path().string(), std::string("/dev/zero"), std::string("/dev/null")})
    CHECK_THAT(error_of([&] { read_all(path); }), ContainsSubstring("no regular file") && ContainsSubstring(path));
  for (const std::string name : {"dangling", "circle", "missing"})
    CHECK_THAT(error_of([&] { read_all(folder / name); }), ContainsSubstring("cannot be read") && ContainsSubstring(name));
  CHECK_THAT(error_of([&] { SafetensorsFile(""); }), ContainsSubstring("empty or has a zero byte"));
  CHECK_THAT(error_of([&] { SafetensorsFile(std::string("a\0b", 3)); }), ContainsSubstring("empty or has a zero byte"));
}

TEST_CASE("a file cut off anywhere is refused, one with a flipped bit in its header never harms",
          "[checkpoint][safetensors][hostile][quick]") {
  const TempFolder folder;
  const auto path = folder / "a.safetensors";
  write_safetensors(path, {{"weight", torch::arange(6.f).view({2, 3})}, {"ids", torch::arange(4)}}, {{"format", "pt"}});
  const std::string whole = bytes_of(path);
  REQUIRE(error_of([&] { read_all(path); }) == "no error");
  for (size_t length = 0; length < whole.size(); ++length) {
    INFO(length << " bytes");
    write_bytes(path, whole.substr(0, length));
    CHECK(error_of([&] { read_all(path); }).find("a.safetensors") != std::string::npos);
  }
  write_bytes(path, whole + "x");
  CHECK_THAT(error_of([&] { read_all(path); }), ContainsSubstring("belongs to none"));
  const size_t header_end = whole.size() - 6 * sizeof(float) - 4 * sizeof(int64_t);
  int refused = 0, read = 0;
  for (size_t byte = 0; byte < header_end; ++byte)
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = whole;
      flipped[byte] = static_cast<char>(flipped[byte] ^ (1 << bit));
      write_bytes(path, flipped);
      error_of([&] { read_all(path); }) == "no error" ? ++read : ++refused;  // a name, or a dtype of the same size, may become another
    }
  CHECK(refused > 4 * read);
}
