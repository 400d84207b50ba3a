// A unit: the flat groups that are gathered and freed together.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "runtime/flat_group.h"

namespace fsdp {

// What the unsharded buffers hold.
enum class BufferState {
  ABSENT,     // no memory
  GATHERING,  // memory that `gathers` are filling
  RESIDENT,   // memory, filled with the current values of all ranks' shards
};

struct Unit {
  std::string name;   // path of its module, empty for the root unit
  std::string title;  // for messages: "unit 'blocks.0'" or "the root unit"
  size_t index = 0;   // in the plan
  std::vector<std::unique_ptr<FlatGroup>> groups;

  BufferState state = BufferState::ABSENT;
  std::vector<comm::Pending> gathers;  // GATHERING only
  bool wanted = false;                 // by an operator that is about to run; it stays where it is wanted or pinned
  int pins = 0;                        // operators that are running and may point into it
  int64_t last_use = 0;                // position in the model's sequence of accesses
  bool prefetched = false;             // gathered in advance and not used since

  bool is_root() const { return name.empty(); }
  int64_t unsharded_bytes() const {  // that it takes when it is not absent
    int64_t bytes = 0;
    for (const auto& group : groups) bytes += group->is_whole() ? 0 : group->unsharded_bytes();
    return bytes;
  }
};

}  // namespace fsdp
