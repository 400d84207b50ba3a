#include "runtime/residency.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "runtime/access_key.h"

namespace fsdp {
namespace {

int64_t memory_of(const FlatGroup& group) { return group.is_whole() ? 0 : group.unsharded_bytes(); }

}  // namespace

void Residency::acquire(const std::vector<Unit*>& wanted, const char* phase) {
  // Pinned first, so that making room for one argument of an operator never frees another.
  int absent = 0;
  for (Unit* unit : wanted) {
    unit->last_use = ++clock_;
    if (unit->pins++ == 0 && unit->state == BufferState::ABSENT && !unit->is_root()) ++absent;
  }
  try {
    make_room_for(absent);
    for (Unit* unit : wanted)
      if (unit->state == BufferState::ABSENT) gather(*unit, phase);
  } catch (...) {
    release(wanted);
    throw;
  }
}

void Residency::release(const std::vector<Unit*>& pinned) {
  for (Unit* unit : pinned) --unit->pins;
}

void Residency::gather(Unit& unit, const char* phase) {
  RECORD_FUNCTION("fsdp::unshard " + unit.name, {});
  // Not recorded by autograd, and through a tensor with a version counter of its own: a refill is no modification.
  at::AutoDispatchBelowAutograd below_autograd;
  WithoutAccessHook no_hook;
  std::vector<comm::Pending> pending;
  try {
    for (auto& group : unit.groups) {
      group->allocate_unsharded();
      if (group->unsharded.numel() == 0 || group->is_whole()) continue;
      if (collectives_.world_size() == 1) {
        group->unsharded.copy_(group->shard);
      } else if (group->dtype == group->compute_dtype) {
        pending.push_back(collectives_.all_gather(group->unsharded, group->shard, unit.title + ", " + phase));
      } else {  // each rank casts its own part, so that the gather moves the narrower type
        auto own = group->own_part();
        own.copy_(group->shard);
        pending.push_back(collectives_.all_gather(group->unsharded, own, unit.title + ", " + phase));
      }
    }
    for (auto& gather : pending) gather.wait();
  } catch (...) {
    for (auto& group : unit.groups) group->free_unsharded();
    throw;
  }
  unit.state = BufferState::RESIDENT;
  for (const auto& group : unit.groups) resident_bytes_ += memory_of(*group);
  peak_bytes_ = std::max(peak_bytes_, resident_bytes_);
}

void Residency::make_room_for(int units) {
  while (true) {
    int beside_root = units;
    Unit* oldest = nullptr;
    for (const auto& unit : units_) {
      if (unit->is_root() || unit->state == BufferState::ABSENT) continue;
      ++beside_root;
      if (unit->pins == 0 && (!oldest || unit->last_use < oldest->last_use)) oldest = unit.get();
    }
    if (beside_root <= kUnitsBesideRoot || !oldest) return;  // an operator that needs more at once gets more
    free(*oldest);
  }
}

void Residency::free(Unit& unit) {
  if (unit.state == BufferState::ABSENT || unit.pins) return;
  unit.state = BufferState::ABSENT;
  for (const auto& group : unit.groups) {
    group->free_unsharded();
    resident_bytes_ -= memory_of(*group);
  }
}

void Residency::free_all() {
  for (const auto& unit : units_) free(*unit);
}

}  // namespace fsdp
