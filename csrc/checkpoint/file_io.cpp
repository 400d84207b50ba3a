#include "checkpoint/file_io.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

namespace fsdp {
namespace {

std::string folder_of(const std::string& path) {
  const auto parent = std::filesystem::path(path).parent_path();
  return parent.empty() ? "." : parent.string();
}

}  // namespace

int open_regular(const std::string& path, int64_t& bytes) {
  TORCH_CHECK(!path.empty() && path.find('\0') == std::string::npos, "the path of a file to be read is empty or has a zero byte");
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  TORCH_CHECK(file >= 0, "'", path, "' cannot be read: ", std::strerror(errno));
  struct stat facts {};
  if (::fstat(file, &facts) != 0 || !S_ISREG(facts.st_mode)) {
    ::close(file);
    TORCH_CHECK(false, "'", path, "' is no regular file");
  }
  bytes = facts.st_size;
  return file;
}

void read_exactly(int file, const std::string& path, int64_t begin, void* data, size_t bytes) {
  auto* to = static_cast<char*>(data);
  for (size_t done = 0; done < bytes;) {
    const auto got = ::pread(file, to + done, bytes - done, static_cast<off_t>(begin + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    TORCH_CHECK(got > 0, "'", path, "' cannot be read at byte ", begin + static_cast<int64_t>(done), ": ",
                got == 0 ? "it has become shorter" : std::strerror(errno));
    done += static_cast<size_t>(got);
  }
}

void write_exactly(int file, const std::string& path, const void* data, size_t bytes) {
  const auto* from = static_cast<const char*>(data);
  for (size_t done = 0; done < bytes;) {
    const auto put = ::write(file, from + done, bytes - done);
    if (put < 0 && errno == EINTR) continue;
    const int error = errno;
    if (put <= 0) {
      struct statvfs room {};
      const bool known = ::fstatvfs(file, &room) == 0;
      TORCH_CHECK(false, "'", path, "' cannot be written: ", std::strerror(error), "; ", bytes - done, " bytes were to be written, ",
                  known ? std::to_string(static_cast<uint64_t>(room.f_bavail) * room.f_frsize) : "an unknown number", " are free");
    }
    done += static_cast<size_t>(put);
  }
}

std::string read_text_file(const std::string& path, int64_t most_bytes) {
  int64_t bytes = 0;
  const int file = open_regular(path, bytes);
  std::string text;
  try {
    TORCH_CHECK(bytes <= most_bytes, "'", path, "' has ", bytes, " bytes; expected at most ", most_bytes);
    text.resize(static_cast<size_t>(bytes));
    read_exactly(file, path, 0, text.data(), text.size());
  } catch (...) {
    ::close(file);
    throw;
  }
  ::close(file);
  return text;
}

void write_text_file(const std::string& path, const std::string& text) {
  const auto temporary = temporary_beside(path);
  const int file = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  TORCH_CHECK(file >= 0, "'", path, "' cannot be made: ", std::strerror(errno));
  try {
    write_exactly(file, path, text.data(), text.size());
  } catch (...) {
    ::close(file);
    ::unlink(temporary.c_str());
    throw;
  }
  publish(file, temporary, path);
}

void check_room(const std::string& path, int64_t bytes) {
  struct statvfs room {};
  const auto folder = folder_of(path);
  if (::statvfs(folder.c_str(), &room) != 0) return;  // opening the file says what is wrong
  const auto free = static_cast<int64_t>(room.f_bavail * room.f_frsize);
  TORCH_CHECK(bytes <= free, "'", path, "' needs ", bytes, " bytes, its file system has ", free, " free; nothing was written");
}

std::string temporary_beside(const std::string& path) { return path + ".tmp-" + std::to_string(::getpid()); }

void publish(int file, const std::string& temporary, const std::string& path) {
  const auto fail = [&](const char* what, int error) {
    ::unlink(temporary.c_str());
    TORCH_CHECK(false, "'", path, "' cannot be ", what, ": ", std::strerror(error));
  };
  if (::fsync(file) != 0) {
    const int error = errno;
    ::close(file);
    fail("written to the disk", error);
  }
  if (::close(file) != 0) fail("closed", errno);
  if (std::rename(temporary.c_str(), path.c_str()) != 0) fail("put in its place", errno);
  const int folder = ::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
}

}  // namespace fsdp
