// NCCL, for tensors on CUDA devices: a library of its own, libfsdp_nccl, so that a program on CPU does not start with what it never
// uses (CUDA's libraries take 350 MB and 0.4 s in every rank).
#pragma once

#include "comm/c10d_collectives.h"

#include <c10/core/Device.h>

namespace fsdp::comm {

// The file that holds it, of this version.
extern const char* const kNcclLibrary;

// Loads the library. Throws c10::Error naming the device, and what was found, where it cannot be loaded or the device is not there.
// REQUIRES: a CUDA device with an index.
MakeBackend nccl_on(c10::Device device, const std::string& file = kNcclLibrary);

// What libfsdp_nccl offers, under the one name that it exports.
struct NcclLibrary {
  std::string (*problem_with)(c10::DeviceIndex index);  // "" where the device can be used
  c10::intrusive_ptr<c10d::Backend> (*make)(const BackendPlace& place, c10::DeviceIndex index);
};
inline constexpr const char* kNcclLibrarySymbol = "fsdp_nccl_library";

}  // namespace fsdp::comm
