// What the environment says about the group that this process is to join.
#pragma once

#include <cstdint>
#include <string>

namespace fsdp::comm {

struct Environment {
  int rank = 0;
  int world_size = 1;
  std::string master_addr;  // empty: nothing is set, a process on its own
  uint16_t master_port = 0;
  bool agent_store = false;  // torchrun's agent listens already: everybody joins as a client
  int restart_count = 0;     // torchrun's: the agent's store survives restarts, so keys of each attempt are kept apart
};

// Reads RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE and TORCHELASTIC_RESTART_COUNT. Throws
// c10::Error naming the variable and its value when one is missing, empty, not a number or out of range. Opens nothing.
Environment read_environment();

}  // namespace fsdp::comm
