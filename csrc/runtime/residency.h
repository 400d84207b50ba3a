// Which units' unsharded buffers hold memory, and when they are gathered and freed.
//
// A unit is gathered when an operator is about to read it. Beside the root unit the two units used last stay resident; older ones
// are freed. The decisions depend on nothing but the sequence of accesses, since every rank must make the same ones: they are the
// order of the collectives.
//
// Thread safety: the model's lock is held by the caller.
#pragma once

#include <vector>

#include "runtime/counters.h"
#include "runtime/unit.h"

namespace fsdp {

class Residency {
 public:
  static constexpr int kUnitsBesideRoot = 2;

  Residency(CountedCollectives& collectives, std::vector<std::unique_ptr<Unit>>& units) : collectives_(collectives), units_(units) {}

  // Makes every unit of `wanted` resident and pins it once per entry, after freeing what there is no room for. `phase` is for
  // messages. An error leaves no pin behind.
  void acquire(const std::vector<Unit*>& wanted, const char* phase);
  void release(const std::vector<Unit*>& pinned);

  void free(Unit& unit);  // does nothing for an absent or pinned unit
  void free_all();

  int64_t resident_bytes() const { return resident_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }

 private:
  void gather(Unit& unit, const char* phase);
  void make_room_for(int units);

  CountedCollectives& collectives_;
  std::vector<std::unique_ptr<Unit>>& units_;
  int64_t clock_ = 0;
  int64_t resident_bytes_ = 0;
  int64_t peak_bytes_ = 0;
};

}  // namespace fsdp
