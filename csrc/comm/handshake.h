// The handshake: before any connection between ranks is made, every process writes on the board who it is, reads what the others
// wrote, and finds out whether they can form one group.
#pragma once

#include "comm/board.h"

#include <chrono>
#include <string>
#include <vector>

namespace fsdp::comm {

// One process, as the others see it. Fields that must be equal in a group come first.
struct Member {
  int world_size = 1;
  std::string library_version;
  std::string torch_version;
  std::string backend;
  int rank = 0;
  std::string host;      // name, for messages
  std::string loopback;  // equal for two processes exactly if they reach each other over the loopback interface and see each other's pid
  int64_t pid = 0;
  std::string origin = {};  // of a rank of a part: "rank 3 of 4", its place before the split. Never on the board

  std::string to_string() const;  // "rank 1 (host vm, pid 123)", of a part "rank 1 (rank 3 of 4 before the split, host vm, pid 123)"
};

// This process, with the versions it was built with.
Member this_process(int rank, int world_size, const std::string& backend);

// The first contradiction among processes that came in this order, or "".
std::string contradiction(const std::vector<Member>& members);

// Returns the members in rank order once all have come. Throws c10::Error on a contradiction, after `limit` (naming who is missing),
// when another process gave up, or when the board is lost. `hosting`: this process serves the store, and must not leave before the
// others have read why (at most two seconds).
std::vector<Member> shake_hands(Board& board, const Member& self, bool hosting, std::chrono::milliseconds limit);

// The key under which a process that came too late, and contradicts the group, says so.
inline constexpr const char* kContradictionKey = "contradiction";

}  // namespace fsdp::comm
