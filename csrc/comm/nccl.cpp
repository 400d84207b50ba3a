#include "comm/nccl.h"

#include <c10/util/Exception.h>

#include <dlfcn.h>

namespace fsdp::comm {

const char* const kNcclLibrary = FSDP_NCCL_LIBRARY;

namespace {

// Never unloaded: LibTorch registers its CUDA operators when it comes in, and they stay.
const NcclLibrary& load(const std::string& who, const std::string& file) {
  // Beside this library, as its own search path says, or where LD_LIBRARY_PATH says.
  void* library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  const char* why = library ? nullptr : dlerror();
  TORCH_CHECK(library, who, " needs ", file, ", which belongs beside libfsdp and cannot be loaded: ", why ? why : "no reason given",
              "; it is built where LibTorch's CUDA libraries and their headers are there (scripts/setup brings them)");
  void* symbol = dlsym(library, kNcclLibrarySymbol);
  TORCH_CHECK(symbol, who, " needs libfsdp's ", file, "; the one that was found is another library");
  return *static_cast<const NcclLibrary*>(symbol);
}

}  // namespace

MakeBackend nccl_on(c10::Device device, const std::string& file) {
  const std::string who = c10::str("ProcessGroupOptions asks for device ", device, " (backend nccl), which");
  const NcclLibrary& library = load(who, file);
  const std::string problem = library.problem_with(device.index());
  TORCH_CHECK(problem.empty(), who, " is not there: ", problem, "; choose another device, or cpu");
  return [&library, index = device.index()](const BackendPlace& place) { return library.make(place, index); };
}

}  // namespace fsdp::comm
