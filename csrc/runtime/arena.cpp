#include "runtime/arena.h"

#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

namespace fsdp {
namespace {

at::DataPtr lend(const std::shared_ptr<at::DataPtr>& memory, int64_t begin) {
  using Holder = std::shared_ptr<at::DataPtr>;
  return {static_cast<char*>(memory->get()) + begin, new Holder(memory), [](void* holder) { delete static_cast<Holder*>(holder); },
          memory->device()};
}

}  // namespace

at::Tensor Arena::place(Unit& unit, FlatGroup& group) {
  const int64_t bytes = rounded_up(group.unsharded_bytes());
  if (!memory_) memory_ = allocate(bytes_);
  int64_t begin = 0;
  auto gap = find_gap(bytes, begin);
  if (gap == places_.end() && begin + bytes > bytes_) {
    move_together();
    gap = find_gap(bytes, begin);
  }
  if (begin + bytes > bytes_) return {};
  places_.insert(gap, {&unit, &group, begin, bytes});
  group.hold_memory(lend(memory_, begin));
  return group.flat_on(lend(memory_, begin));
}

at::Tensor Arena::place_outside(FlatGroup& group) {
  const Memory own = allocate(group.unsharded_bytes());
  group.hold_memory(lend(own, 0));
  return group.flat_on(lend(own, 0));
}

void Arena::remove(FlatGroup& group) {
  std::erase_if(places_, [&](const Place& place) { return place.group == &group; });
}

Arena::Memory Arena::allocate(int64_t bytes) {
  ++allocations_;
  return std::make_shared<at::DataPtr>(c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes));
}

// The first gap that is long enough: `begin` receives where it starts, the result is the place behind it.
std::vector<Arena::Place>::iterator Arena::find_gap(int64_t bytes, int64_t& begin) {
  begin = 0;
  for (auto place = places_.begin(); place != places_.end(); ++place) {
    if (place->begin - begin >= bytes) return place;
    begin = place->begin + place->bytes;
  }
  return places_.end();
}

void Arena::move_together() {
  int64_t begin = 0;
  for (auto& place : places_) {
    const bool at_rest = place.unit->pins == 0 && place.unit->state == BufferState::RESIDENT;
    if (at_rest && place.begin > begin) {
      auto* base = static_cast<char*>(memory_->get());
      std::memmove(base + begin, base + place.begin, place.bytes);
      place.begin = begin;
      place.group->hold_memory(lend(memory_, begin));
    }
    begin = place.begin + place.bytes;
  }
}

}  // namespace fsdp
