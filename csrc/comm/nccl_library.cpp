// libfsdp_nccl: the one file that sees CUDA. It knows nothing of the rest of libfsdp but the table that nccl.h describes.
#include "comm/nccl.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <cuda_runtime_api.h>

namespace fsdp::comm {

namespace {

std::string problem_with(c10::DeviceIndex index) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    int driver = 0;  // stays 0 where there is none, of which CUDA speaks as of one that is too old
    cudaDriverGetVersion(&driver);
    return c10::str("this process sees no CUDA device (", driver == 0 ? "no CUDA driver was found" : cudaGetErrorString(error), ")");
  }
  if (index >= count) return c10::str("this process sees ", count, " CUDA devices, cuda:0 to cuda:", count - 1);
  return "";
}

c10::intrusive_ptr<c10d::Backend> make(const BackendPlace& place, c10::DeviceIndex index) {
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = place.timeout;
  auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(place.store, place.rank, place.world_size, std::move(options));
  group->setBoundDeviceId(c10::Device(c10::kCUDA, index));
  return group;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const NcclLibrary fsdp_nccl_library;
const NcclLibrary fsdp_nccl_library{problem_with, make};

}  // namespace fsdp::comm
