// The scheduler: which units' unsharded buffers hold memory, and when they are gathered and freed.
//
// A unit is gathered when an operator is about to read it, or before: the order of accesses is remembered, and while one unit
// computes, the gathers of those that are expected next are under way. Beside the root unit, which stays from its first use to the end
// of the step, the byte budget limits what is there at once, gathers under way included. When room is needed, the unit goes that is
// expected to be used last; among those of which nothing is known, the one used longest ago.
//
// Every rank must decide alike, since decisions are the order of the collectives. So nothing enters them but the plan, the budget and
// the sequence of accesses: no time, and not whether a gather under way is done.
//
// Design note: docs/design/scheduler.md. Thread safety: the model's lock is held by the caller.
#pragma once

#include <vector>

#include "comm/order_memory.h"
#include "plan/budget.h"
#include "runtime/arena.h"
#include "runtime/counters.h"
#include "runtime/unit.h"

namespace fsdp {

// What a unit is read for. Accesses in different phases are different steps of the order.
enum class Phase { FORWARD, FORWARD_WITHOUT_GRADIENTS, BACKWARD, SUMMON };
const char* to_string(Phase phase);

class Scheduler {
 public:
  // REQUIRES: units' indices are their places in `units`, the root unit first if there is one; the budget covers it and the largest other.
  Scheduler(CountedCollectives& collectives, const std::vector<std::unique_ptr<Unit>>& units, UnshardedBudget budget);

  // Makes every unit of `wanted` resident and pins it once per entry, and starts what is expected next. An error leaves no pin behind.
  void acquire(const std::vector<Unit*>& wanted, Phase phase);
  void release(const std::vector<Unit*>& pinned, Phase phase);  // of the phases only whether it was SUMMON counts

  void free(Unit& unit);  // does nothing for an absent or pinned unit
  // The step, or the part of it that needs whole parameters, is over: nothing stays but frozen units, whose values do not change.
  void end_of_step() noexcept;
  void free_all() noexcept;  // also frozen ones; like the above, it drops what a failed gather leaves: the group reports that itself

  int64_t resident_bytes() const { return resident_bytes_; }
  int64_t peak_bytes() const { return peak_bytes_; }
  int64_t prefetches() const { return prefetches_; }
  int64_t prefetch_hits() const { return prefetch_hits_; }
  int64_t allocations() const { return arena_.allocations(); }

 private:
  using Symbol = comm::OrderMemory::Symbol;

  bool note(Symbol symbol);  // false: the same as before
  void gather_wanted(const std::vector<Unit*>& wanted, Phase phase, bool moved_on);
  void start(Unit& unit, Phase phase);
  at::Tensor place(Unit& unit, FlatGroup& group);
  void finish(Unit& unit);
  void drop(Unit& unit) noexcept;
  void free_quietly(Unit& unit) noexcept;
  void check_fits(const std::vector<Unit*>& wanted) const;
  void make_room(int64_t bytes);
  bool make_room_for_prefetch(int64_t bytes, size_t ahead);
  void prefetch();
  std::vector<size_t> next_uses() const;
  std::vector<Unit*> by_falling_next_use(size_t later_than) const;
  int64_t free_bytes() const { return budget_.bytes - resident_bytes_ - absent_root_bytes_; }

  CountedCollectives& collectives_;
  const std::vector<std::unique_ptr<Unit>>& units_;
  const UnshardedBudget budget_;
  Arena arena_;
  comm::OrderMemory order_;
  std::optional<Symbol> current_;  // the last of order_
  int64_t clock_ = 0;
  int summons_ = 0;    // whoever summons asks for what he gets: the budget is not strict meanwhile
  int under_way_ = 0;  // units being gathered
  int64_t absent_root_bytes_ = 0;
  int64_t resident_bytes_ = 0;
  int64_t peak_bytes_ = 0;
  int64_t prefetches_ = 0;
  int64_t prefetch_hits_ = 0;
};

}  // namespace fsdp
