// A group that communicates nothing: this rank's own values are taken for every rank's. The library then does all that it does among
// several ranks, except waiting for and hearing of them; what a step takes longer with a real group is the communication that
// computing did not hide. What is trained this way is no model: losses mean nothing.
#pragma once

#include "comm/collectives.h"

#include <memory>

namespace benchmark {

// REQUIRES: 0 ≤ rank < world_size
std::shared_ptr<fsdp::comm::Collectives> make_silent(int rank, int world_size);

}  // namespace benchmark
