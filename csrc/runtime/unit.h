// A unit: the flat groups that are gathered and freed together.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "runtime/flat_group.h"

namespace fsdp {

// What the unsharded buffers hold. There is no state between: gathering is finished before an operator runs.
enum class BufferState {
  ABSENT,    // no memory
  RESIDENT,  // memory, filled with the current values of all ranks' shards
};

struct Unit {
  std::string name;   // path of its module, empty for the root unit
  std::string title;  // for messages: "unit 'blocks.0'" or "the root unit"
  std::vector<std::unique_ptr<FlatGroup>> groups;

  BufferState state = BufferState::ABSENT;
  int pins = 0;          // operators that are reading it now; a pinned unit stays
  int64_t last_use = 0;  // position in the model's sequence of accesses

  bool is_root() const { return name.empty(); }
};

}  // namespace fsdp
