// The collectives over a c10d backend: one that is made for the ranks of a meeting, or one that somebody made and hands over.
#pragma once

#include "comm/collectives.h"
#include "comm/rendezvous.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <functional>
#include <memory>
#include <string>

namespace fsdp::comm {

// What a backend needs to connect one rank with the others.
struct BackendPlace {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0;
  int world_size = 1;
  std::string address;                      // of this process, where connections from other ranks arrive
  std::chrono::milliseconds connect_limit;  // the longest that connecting may take,
  std::chrono::milliseconds timeout;        // and that one operation may take
};

// Called on a thread of its own, since it may block for as long as the other ranks let it. May be called again, for parts of the group.
using MakeBackend = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendPlace&)>;

// Connects the members of a meeting. Throws c10::Error after `connect_limit`, and when a member fails or is gone.
std::shared_ptr<Collectives> connect_members(Meeting meeting, MakeBackend make, std::chrono::milliseconds timeout,
                                             std::chrono::milliseconds connect_limit);

// Drives a backend that connects the members of a meeting already. Cannot be split, since nobody knows how to make another one.
std::shared_ptr<Collectives> take_over_backend(Meeting meeting, c10::intrusive_ptr<c10d::Backend> backend,
                                               std::chrono::milliseconds timeout);

}  // namespace fsdp::comm
