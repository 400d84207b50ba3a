#include "support/faulty_files.h"

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace {

struct State {
  bool armed = false;
  fsdp::testing::FileFaults faults;
  int64_t calls = 0, bytes = 0;
};

// By thread: what others write at the same time (sockets, logs) is none of it.
thread_local State state;

template <class Function>
Function next(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

// False: the call fails, with errno set.
bool may_go_on() {
  if (!state.armed) return true;
  const auto& faults = state.faults;
  ++state.calls;
  if (state.calls == faults.end_process_at) _exit(fsdp::testing::kEnded);
  const bool fails = faults.fail_at > 0 && (faults.once ? state.calls == faults.fail_at : state.calls >= faults.fail_at);
  if (fails) errno = faults.error;
  return !fails;
}

}  // namespace

extern "C" {

ssize_t write(int file, const void* data, size_t bytes) {
  static const auto real = next<ssize_t (*)(int, const void*, size_t)>("write");
  if (!state.armed) return real(file, data, bytes);
  if (!may_go_on()) return -1;
  const auto& faults = state.faults;
  if (faults.short_writes) {
    if (state.calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    bytes = (bytes + 1) / 2;
  }
  if (faults.disk_bytes >= 0) {
    const int64_t room = faults.disk_bytes - state.bytes;
    if (room <= 0 && bytes > 0) {
      errno = ENOSPC;
      return -1;
    }
    bytes = std::min(bytes, static_cast<size_t>(room));
  }
  const auto written = real(file, data, bytes);
  if (written > 0) state.bytes += written;
  return written;
}

int fsync(int file) {
  static const auto real = next<int (*)(int)>("fsync");
  return may_go_on() ? real(file) : -1;
}

int rename(const char* from, const char* to) noexcept {
  static const auto real = next<int (*)(const char*, const char*)>("rename");
  return may_go_on() ? real(from, to) : -1;
}

int renameat2(int from_folder, const char* from, int to_folder, const char* to, unsigned flags) noexcept {
  static const auto real = next<int (*)(int, const char*, int, const char*, unsigned)>("renameat2");
  return may_go_on() ? real(from_folder, from, to_folder, to, flags) : -1;
}

}  // extern "C"

namespace fsdp::testing {

ArmedFaults::ArmedFaults(const FileFaults& faults) { state = {true, faults, 0, 0}; }
ArmedFaults::~ArmedFaults() { state.armed = false; }
int64_t ArmedFaults::calls() const { return state.calls; }
int64_t ArmedFaults::bytes() const { return state.bytes; }

}  // namespace fsdp::testing
