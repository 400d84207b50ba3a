// The collectives over Gloo, for tensors on CPU.
#pragma once

#include "comm/collectives.h"
#include "comm/rendezvous.h"

#include <chrono>
#include <memory>

namespace fsdp::comm {

// Connects the members of a meeting. Throws c10::Error after `connect_limit`, and when a member fails or is gone. `timeout` is the
// longest that one operation may take.
std::shared_ptr<Collectives> make_gloo(Meeting meeting, std::chrono::milliseconds timeout, std::chrono::milliseconds connect_limit);

}  // namespace fsdp::comm
