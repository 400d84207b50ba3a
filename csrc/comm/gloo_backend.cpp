// The one file that sees Gloo's headers (the LibTorch wheel lacks them). No type of Gloo's own is derived from or called: those
// headers need not be of the version that LibTorch was built with.
#include "comm/gloo_backend.h"

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <utility>

namespace fsdp::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendPlace& place) {
  auto options = c10d::ProcessGroupGloo::Options::create(place.connect_limit);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(place.address));
  auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(place.store, place.rank, place.world_size, std::move(options));
  group->setTimeout(place.timeout + std::chrono::seconds(2));  // whoever waits gives up before, and says more
  return group;
}

}  // namespace fsdp::comm
