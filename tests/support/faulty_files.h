// Files on a disk that fails, for what the test executable itself writes: it has its own write, fsync, rename and renameat2, which do as
// the C library's do unless a fault is armed.
#pragma once

#include <cstdint>

namespace fsdp::testing {

// Calls are those of write, fsync, rename and renameat2, counted from 1 on while armed.
struct FileFaults {
  int64_t end_process_at = 0;  // _exit(kEnded) instead of this call; 0: never
  int64_t fail_at = 0;         // this call fails with `error`, and so do all after it unless `once`
  int error = 0;
  bool once = false;
  int64_t disk_bytes = -1;    // writes of more than so many bytes in all write what fits, then fail with ENOSPC; -1: no end
  bool short_writes = false;  // a write takes half of what it is given, and every third is interrupted first
};

constexpr int kEnded = 77;

class ArmedFaults {
 public:
  explicit ArmedFaults(const FileFaults& faults);
  ~ArmedFaults();
  ArmedFaults(const ArmedFaults&) = delete;
  ArmedFaults& operator=(const ArmedFaults&) = delete;
  int64_t calls() const;
  int64_t bytes() const;  // written
};

}  // namespace fsdp::testing
