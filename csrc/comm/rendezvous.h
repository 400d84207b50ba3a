// Rendezvous: how the processes of a group find each other.
//
// Rank 0 serves a store at MASTER_ADDR:MASTER_PORT, on that address only, and the others connect to it; under torchrun's agent store
// all connect. A second process that claims rank 0 finds the port taken and connects as well, so that the handshake sees two. Where
// nobody listens for a second, any process to which MASTER_ADDR belongs serves the store: else two processes that both claim rank 1
// would wait for a rank 0 that does not exist, and learn nothing of each other.
#pragma once

#include "comm/board.h"
#include "comm/environment.h"
#include "comm/handshake.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::comm {

struct Meeting {
  std::shared_ptr<HostedStore> hosted;  // null where another process serves the store. Declared first: it must outlive the board
  std::unique_ptr<Board> board;
  std::vector<Member> members;  // in rank order
  int rank = 0;
  std::string address;  // of this process, for connections between ranks: loopback where all are on one host
};

// Meets the others that `environment` speaks of; `self` is what this process says of itself. All ranks must call equally often: each
// meeting at one place has keys of its own. Throws c10::Error after `limit`, and as shake_hands() does.
Meeting meet(const Environment& environment, const Member& self, std::chrono::milliseconds limit);

// Meets the members of a group that has a store already, `self` being one of them. All ranks must call equally often, one after the
// other: each meeting has keys of its own.
Meeting meet_at(const c10::intrusive_ptr<c10d::Store>& store, const Member& self, std::chrono::milliseconds limit);

}  // namespace fsdp::comm
