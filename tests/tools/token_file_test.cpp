// Token ids from files, and files that are none.
#include "tools/token_file.h"

#include <torch/torch.h>

#include <catch2/catch_all.hpp>
#include <fstream>

#include "support/temp_folder.h"

namespace {

using Catch::Matchers::ContainsSubstring;
using fsdp::tools::TokenFile;

std::string write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
  return path;
}

std::vector<int64_t> read(const TokenFile& file, int64_t begin, int64_t count) {
  auto out = torch::empty({count}, torch::kLong);
  file.read(begin, out);
  return {out.data_ptr<int64_t>(), out.data_ptr<int64_t>() + count};
}

std::string error_of(const std::string& path) {
  try {
    TokenFile file(path);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace

TEST_CASE("bytes of a text, and ids of two and four bytes", "[tools][quick]") {
  const fsdp::testing::TempFolder folder;
  const TokenFile text(write(folder / "a.txt", "ab\xff"));
  CHECK(text.size() == 3);
  CHECK(read(text, 1, 2) == std::vector<int64_t>{'b', 255});
  CHECK(text.largest(0, 2) == 'b');

  write(folder / "b.json", R"({"dtype": "uint16", "tokens": 3})");
  const TokenFile two(write(folder / "b.bin", std::string("\x01\x00\x02\x01\xff\xff", 6)));
  CHECK(read(two, 0, 3) == std::vector<int64_t>{1, 258, 65535});

  write(folder / "c.json", R"({"dtype": "uint32"})");
  const TokenFile four(write(folder / "c.bin", std::string("\x01\x00\x00\x00\xff\xff\xff\xff", 8)));
  CHECK(read(four, 0, 2) == std::vector<int64_t>{1, 4294967295});
  CHECK(four.largest(0, 2) == 4294967295);
}

TEST_CASE("files that are no tokens are refused by name", "[tools][quick]") {
  const fsdp::testing::TempFolder folder;
  CHECK_THAT(error_of(folder / "missing.txt"), ContainsSubstring("missing.txt") && ContainsSubstring("No such file"));
  CHECK_THAT(error_of(write(folder / "a.csv", "1")), ContainsSubstring("a .txt (bytes) or .bin"));
  CHECK_THAT(error_of(write(folder / "alone.bin", "12")), ContainsSubstring("alone.json"));
  write(folder / "odd.json", R"({"dtype": "uint16"})");
  CHECK_THAT(error_of(write(folder / "odd.bin", "123")), ContainsSubstring("3 bytes, which is no multiple of the 2"));
  write(folder / "bad.json", R"({"dtype": "int8"})");
  CHECK_THAT(error_of(write(folder / "bad.bin", "12")), ContainsSubstring("expected \"dtype\""));
  std::filesystem::create_directory(folder / "dir.txt");
  CHECK_THAT(error_of(folder / "dir.txt"), ContainsSubstring("no regular file"));
}
