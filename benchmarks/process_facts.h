// What the kernel knows about this process.
#pragma once

#include <unistd.h>

#include <ctime>
#include <fstream>
#include <sstream>
#include <string>

namespace benchmark {

// Seconds since this process was started: loading and linking included.
inline double seconds_since_start() {
  std::ifstream file("/proc/self/stat");
  std::string text{std::istreambuf_iterator<char>(file), {}};
  std::istringstream fields(text.substr(text.rfind(')') + 1));  // the name before may hold anything
  std::string field;
  for (int i = 3; i <= 22; ++i) fields >> field;  // 22: the start, in ticks after boot
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
         std::stod(field) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// Milliseconds of all threads on processors so far, in user and kernel mode.
inline double processor_ms() {
  timespec used{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return 1e3 * static_cast<double>(used.tv_sec) + 1e-6 * static_cast<double>(used.tv_nsec);
}

// The most physical memory that this process has had, in MB of 10^6 bytes.
inline double peak_resident_mb() {
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    if (word != "VmHWM:") continue;
    double kib = 0;
    file >> kib;
    return kib * 1024 / 1e6;
  }
  return 0;
}

}  // namespace benchmark
