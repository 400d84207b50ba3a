// Reading and writing whole ranges, with errors that say where and what.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fsdp {

// An open regular file, closed when it goes. Opening never blocks (a FIFO is refused).
int open_regular(const std::string& path, int64_t& bytes);

void read_exactly(int file, const std::string& path, int64_t begin, void* data, size_t bytes);
void write_exactly(int file, const std::string& path, const void* data, size_t bytes);
std::string read_text_file(const std::string& path, int64_t most_bytes);

void write_text_file(const std::string& path, const std::string& text);  // appears whole, and on the disk

// Throws, with bytes wanted and free, when the file system that holds `path` has less room than that.
void check_room(const std::string& path, int64_t bytes);

// A name in the same folder that no other process uses; what is written there becomes `path` by publish().
std::string temporary_beside(const std::string& path);
// fsync, close, rename to `path`, fsync of the folder. `file` is closed in any case; on an error the temporary file is removed.
void publish(int file, const std::string& temporary, const std::string& path);

}  // namespace fsdp
