// Gloo, for tensors on CPU.
#pragma once

#include "comm/c10d_collectives.h"

namespace fsdp::comm {

c10::intrusive_ptr<c10d::Backend> make_gloo(const BackendPlace& place);

}  // namespace fsdp::comm
