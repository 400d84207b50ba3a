// What launchers, or the program itself, say about the group that this process is to join.
#pragma once

#include <fsdp/process_group.h>

#include <cstdint>
#include <optional>
#include <string>

namespace fsdp::comm {

struct Environment {
  int rank = 0;
  int world_size = 1;  // 1: nobody is to be met, and the rest means nothing
  std::optional<int> local_rank;
  std::string master_addr;
  uint16_t master_port = 0;
  std::string place;         // where these two come from, for messages: "MASTER_ADDR=10.0.0.1 MASTER_PORT=29500"
  bool agent_store = false;  // torchrun's agent listens already: everybody joins as a client
  int restart_count = 0;     // torchrun's: the agent's store survives restarts, so keys of each attempt are kept apart
};

// The options' rank, world_size, master_addr and master_port; where they are not given, what the environment says, by the order of
// precedence that init_process_group documents. Throws c10::Error naming the variable and its value when one is missing, empty, not a
// number, out of range or contradicts another. Opens nothing.
Environment read_environment(const ProcessGroupOptions& options = {});

// The first host of a list as Slurm writes it: "n[001-003,7]-ib,m1" → "n001-ib". Empty where the text is no such list.
std::string first_host(const std::string& nodelist);

}  // namespace fsdp::comm
