// Groups for CUDA devices, as far as a machine without one can tell; and that a program on CPU pays nothing for them.
#include "comm/collectives.h"
#include "comm/nccl.h"
#include "support/environment_scope.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

#include <torch/torch.h>

#include <filesystem>
#include <fstream>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::ProcessGroupOptions;
using fsdp::testing::error_of;
using fsdp::testing::kWithoutGroup;

// Of these, the ones that are loaded in this process.
std::string loaded(const std::vector<std::string>& names) {
  std::ifstream maps("/proc/self/maps");
  std::string all, found;
  for (std::string line; std::getline(maps, line);) all += line + "\n";
  for (const auto& name : names)
    if (all.find(name) != std::string::npos) found += name + " ";
  return found;
}

// libtorch_cpu itself needs libcudart, for the profiler.
const std::vector<std::string> kCuda{"libtorch_cuda", "libc10_cuda", "libcublas", "libcuda.so", "libnccl", "libfsdp_nccl"};

bool driver_is_here() { return std::filesystem::exists("/proc/driver/nvidia/version"); }

}  // namespace

RANK_BODY("loads CUDA when it is asked for") {
  auto joined = fsdp::init_process_group({.rendezvous_timeout = 20s, .device = c10::Device(c10::kCPU)});
  auto sum = torch::ones({3});
  joined.collectives()->all_reduce(sum, "a check").wait();
  EXPECT(loaded(kCuda).empty(), "a group on CPU has loaded " << loaded(kCuda));
  EXPECT(!loaded({"libtorch_cpu"}).empty(), "libtorch_cpu is not seen: the test looks at the wrong place");

  std::string error;
  try {
    fsdp::init_process_group({.rendezvous_timeout = 20s, .device = c10::Device(c10::kCUDA)});
  } catch (const c10::Error& caught) {
    error = caught.what_without_backtrace();
  }
  EXPECT(loaded({"libfsdp_nccl", "libtorch_cuda", "libnccl"}) == "libfsdp_nccl libtorch_cuda libnccl ",
         "loaded: " << loaded(kCuda) << error);
  throw std::runtime_error(error);
}

#if FSDP_HAS_NCCL
TEST_CASE("CUDA is loaded only when it is asked for, and one error says that there is none", "[comm]") {
  if (driver_is_here()) WARN("there is a CUDA driver here: the error of a machine without one is not seen");
  const auto results = fsdp::testing::run_in_own_processes(2, "loads CUDA when it is asked for", 60s, {{kWithoutGroup, "1"}});
  for (const auto& result : results) {
    INFO("rank " << result.rank << ": " << result.message << "\n" << result.output);
    CHECK(result.exit_code == 1);
    CHECK_THAT(result.message, !ContainsSubstring("expected"));  // an EXPECT of the body
    if (driver_is_here()) continue;
    CHECK_THAT(result.message, ContainsSubstring("init_process_group, rank " + std::to_string(result.rank) + " of 2: "));
    CHECK_THAT(result.message, ContainsSubstring("device cuda:" + std::to_string(result.rank) + " (backend nccl), which is not there"));
    CHECK_THAT(result.message, ContainsSubstring("this process sees no CUDA device"));
  }
}

#else
TEST_CASE("no NCCL group was built: asking for a CUDA device is an error that says so", "[comm][quick]") {
  CHECK_THAT(error_of([] { fsdp::init_process_group({.device = c10::Device(c10::kCUDA, 0)}); }),
             ContainsSubstring("device cuda:0 (backend nccl), which needs libfsdp_nccl.so"));
}
#endif

TEST_CASE("a library that is not there, or is another, is named", "[comm][quick]") {
  const auto error = [](const char* file) { return error_of([&] { fsdp::comm::nccl_on(c10::Device(c10::kCUDA, 0), file); }); };
  CHECK_THAT(error("libfsdp_nowhere.so"), ContainsSubstring("device cuda:0 (backend nccl), which needs libfsdp_nowhere.so") &&
                                              ContainsSubstring("cannot be loaded: libfsdp_nowhere.so: cannot open shared object file"));
  CHECK_THAT(error("libc.so.6"), ContainsSubstring("which needs libfsdp's libc.so.6; the one that was found is another library"));
}

TEST_CASE("devices and backends that do not belong together are refused", "[comm][quick]") {
  const auto error = [](const ProcessGroupOptions& options) { return error_of([&] { fsdp::init_process_group(options); }); };
  CHECK_THAT(error({.backend = "gloo", .device = c10::Device(c10::kCUDA, 0)}),
             ContainsSubstring("ProcessGroupOptions::device is cuda:0, which the backend 'gloo' does not serve"));
  CHECK_THAT(error({.backend = "nccl", .device = c10::Device(c10::kCPU)}),
             ContainsSubstring("ProcessGroupOptions::device is cpu, which the backend 'nccl' does not serve"));
  CHECK_THAT(error({.device = c10::Device(c10::kMPS)}), ContainsSubstring("device is mps; groups are for cpu and cuda"));
  CHECK_THAT(error({.backend = "nccl", .rank = 0, .world_size = 2, .master_addr = "127.0.0.1", .master_port = 29500}),
             ContainsSubstring("a CUDA device without an index, and no local rank is known"));
}
