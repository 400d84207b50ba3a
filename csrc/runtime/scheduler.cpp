#include "runtime/scheduler.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/record_function.h>

#include <algorithm>

#include "runtime/access_key.h"

namespace fsdp {
namespace {

constexpr int kMostUnderWay = 2;        // prefetches beside each other; more would delay the one that is needed first
constexpr size_t kLookAhead = 64;       // accesses that are searched for something to prefetch
constexpr size_t kForesight = 1 << 12;  // accesses that are searched for a unit's next use
constexpr size_t kNotForeseen = SIZE_MAX;

constexpr uint64_t kPhases = 4;
constexpr uint64_t kEndOfStep = UINT64_MAX;

uint64_t symbol_of(const Unit& unit, Phase phase) { return unit.index * kPhases + static_cast<uint64_t>(phase); }
size_t unit_of(uint64_t symbol) { return symbol / kPhases; }
Phase phase_of(uint64_t symbol) { return static_cast<Phase>(symbol % kPhases); }

bool is_frozen(const Unit& unit) {
  return std::all_of(unit.groups.begin(), unit.groups.end(), [](const auto& group) {
    return group->replicated ||
           std::none_of(group->parameters.begin(), group->parameters.end(), [](const auto& p) { return p.handle.requires_grad(); });
  });
}

std::string titles_of(const std::vector<Unit*>& units) {
  std::string text;
  for (const Unit* unit : units) text += (text.empty() ? "" : ", ") + unit->title;
  return text;
}

}  // namespace

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::FORWARD:
      return "forward";
    case Phase::FORWARD_WITHOUT_GRADIENTS:
      return "forward without gradients";
    case Phase::BACKWARD:
      return "backward";
    case Phase::SUMMON:
      return "summon_full_params";
  }
  return "unknown phase";
}

Scheduler::Scheduler(CountedCollectives& collectives, const std::vector<std::unique_ptr<Unit>>& units, UnshardedBudget budget)
    : collectives_(collectives), units_(units), budget_(budget), arena_([&] {
        int64_t all = 0, groups = 0;
        for (const auto& unit : units) {
          all += unit->unsharded_bytes();
          groups += static_cast<int64_t>(unit->groups.size());
        }
        return std::min(all, budget.bytes) + groups * Arena::kAlignment;
      }()) {
  if (!units_.empty() && units_.front()->is_root()) absent_root_bytes_ = units_.front()->unsharded_bytes();
}

void Scheduler::acquire(const std::vector<Unit*>& wanted, Phase phase) {
  if (phase != Phase::SUMMON) check_fits(wanted);
  // All first, so that making room for one argument of an operator never frees another.
  bool moved_on = false;
  for (Unit* unit : wanted) {
    unit->wanted = true;
    unit->last_use = ++clock_;
    prefetch_hits_ += std::exchange(unit->prefetched, false);
    if (phase != Phase::SUMMON && !unit->is_root()) moved_on |= note(symbol_of(*unit, phase));
  }
  try {
    gather_wanted(wanted, phase, moved_on);
  } catch (...) {
    for (Unit* unit : wanted) unit->wanted = false;
    throw;
  }
  for (Unit* unit : wanted) {
    unit->wanted = false;
    ++unit->pins;
  }
  summons_ += phase == Phase::SUMMON;
}

void Scheduler::release(const std::vector<Unit*>& pinned, Phase phase) {
  for (Unit* unit : pinned) --unit->pins;
  summons_ -= phase == Phase::SUMMON;
}

void Scheduler::gather_wanted(const std::vector<Unit*>& wanted, Phase phase, bool moved_on) {
  for (Unit* unit : wanted)
    if (unit->state == BufferState::ABSENT) {
      if (!unit->is_root()) make_room(unit->unsharded_bytes());
      start(*unit, phase);
    }
  if (moved_on) prefetch();
  for (Unit* unit : wanted) finish(*unit);
}

bool Scheduler::note(Symbol symbol) {
  if (current_ == symbol) return false;
  current_ = symbol;
  order_.append(symbol);
  return true;
}

void Scheduler::start(Unit& unit, Phase phase) {
  RECORD_FUNCTION("fsdp::unshard " + unit.name, {});
  // Not recorded by autograd, and through a tensor with a version counter of its own: a refill is no modification.
  at::AutoDispatchBelowAutograd below_autograd;
  WithoutAccessHook no_hook;
  unit.state = BufferState::GATHERING;
  ++under_way_;
  resident_bytes_ += unit.unsharded_bytes();
  if (unit.is_root()) absent_root_bytes_ = 0;
  peak_bytes_ = std::max(peak_bytes_, resident_bytes_);
  try {
    for (auto& group : unit.groups) {
      if (group->is_whole()) {
        group->borrow_shard();
        continue;
      }
      const auto whole = place(unit, *group);
      const auto own = group->own_part_of(whole);
      if (collectives_.world_size() == 1 || group->dtype != group->compute_dtype) own.copy_(group->shard);
      if (collectives_.world_size() == 1 || whole.numel() == 0) continue;
      // In another dtype than the shard's each rank casts its own part, so that the gather moves the narrower type.
      const auto& part = group->dtype == group->compute_dtype ? group->shard : own;
      unit.gathers.push_back(collectives_.all_gather(whole, part, unit.title + ", " + to_string(phase)));
    }
  } catch (...) {
    drop(unit);
    throw;
  }
  if (unit.gathers.empty()) finish(unit);
}

at::Tensor Scheduler::place(Unit& unit, FlatGroup& group) {
  auto whole = arena_.place(unit, group);
  if (whole.defined()) return whole;
  // Enough is free, but what is being gathered lies in between and cannot be moved.
  for (const auto& other : units_)
    if (other.get() != &unit) finish(*other);
  whole = arena_.place(unit, group);
  return whole.defined() ? whole : arena_.place_outside(group);
}

void Scheduler::finish(Unit& unit) {
  if (unit.state != BufferState::GATHERING) return;
  try {
    for (auto& gather : unit.gathers) gather.wait();
  } catch (...) {
    drop(unit);
    throw;
  }
  unit.gathers.clear();
  unit.state = BufferState::RESIDENT;
  --under_way_;
}

void Scheduler::free(Unit& unit) {
  if (unit.state == BufferState::ABSENT || unit.pins || unit.wanted) return;
  finish(unit);
  drop(unit);
}

void Scheduler::drop(Unit& unit) noexcept {
  if (unit.state == BufferState::GATHERING) --under_way_;
  unit.gathers.clear();
  unit.prefetched = false;
  unit.state = BufferState::ABSENT;
  resident_bytes_ -= unit.unsharded_bytes();
  if (unit.is_root()) absent_root_bytes_ = unit.unsharded_bytes();
  for (const auto& group : unit.groups) {
    group->release_memory();
    arena_.remove(*group);
  }
}

void Scheduler::free_quietly(Unit& unit) noexcept {
  try {
    free(unit);
  } catch (const std::exception&) {  // the gather's; finish() has dropped the unit
  }
}

void Scheduler::end_of_step() noexcept {
  if (current_) note(kEndOfStep);
  for (const auto& unit : units_)
    if (unit->state == BufferState::GATHERING || !is_frozen(*unit)) free_quietly(*unit);
}

void Scheduler::free_all() noexcept {
  for (const auto& unit : units_) free_quietly(*unit);
}

void Scheduler::check_fits(const std::vector<Unit*>& wanted) const {
  if (!budget_.strict || summons_) return;
  std::vector<Unit*> together;
  int64_t bytes = 0;
  for (const auto& unit : units_)
    if (unit->is_root() || unit->pins || std::find(wanted.begin(), wanted.end(), unit.get()) != wanted.end()) {
      together.push_back(unit.get());
      bytes += unit->unsharded_bytes();
    }
  TORCH_CHECK(bytes <= budget_.bytes, "rank ", collectives_.rank(), ": one operator needs ", titles_of(together), " at the same time, ",
              bytes, " bytes, but FsdpOptions::max_unsharded_bytes is ", budget_.bytes, ". Set it to at least ", bytes,
              ", or make smaller units");
}

void Scheduler::make_room(int64_t bytes) {
  if (free_bytes() >= bytes) return;
  for (Unit* unit : by_falling_next_use(0)) {
    free(*unit);
    if (free_bytes() >= bytes) return;
  }
  // An operator that needs more at once gets more, unless the budget is strict: check_fits.
}

// Only at the expense of units that are expected later than what is fetched, and only if that suffices.
bool Scheduler::make_room_for_prefetch(int64_t bytes, size_t ahead) {
  if (free_bytes() >= bytes) return true;
  std::vector<Unit*> victims;
  int64_t gained = 0;
  for (Unit* unit : by_falling_next_use(ahead + 1)) {
    if (unit->index == unit_of(*current_) || unit->state == BufferState::GATHERING) continue;
    victims.push_back(unit);
    gained += unit->unsharded_bytes();
    if (free_bytes() + gained >= bytes) break;
  }
  if (free_bytes() + gained < bytes) return false;
  for (Unit* unit : victims) free(*unit);
  return true;
}

void Scheduler::prefetch() {
  if (collectives_.world_size() == 1) return;
  for (size_t ahead = 0; ahead < kLookAhead && under_way_ < kMostUnderWay; ++ahead) {
    const auto symbol = order_.foretold(ahead);
    if (!symbol || *symbol == kEndOfStep) return;
    Unit& unit = *units_[unit_of(*symbol)];
    if (unit.state != BufferState::ABSENT) continue;
    if (!make_room_for_prefetch(unit.unsharded_bytes(), ahead)) return;
    start(unit, phase_of(*symbol));
    unit.prefetched = true;
    ++prefetches_;
  }
}

// By unit: how many accesses lie before its next one.
std::vector<size_t> Scheduler::next_uses() const {
  std::vector<size_t> next(units_.size(), kNotForeseen);
  std::vector<bool> frozen;
  for (const auto& unit : units_) frozen.push_back(is_frozen(*unit));
  const bool some_frozen = std::find(frozen.begin(), frozen.end(), true) != frozen.end();
  bool in_this_step = true;
  for (size_t ahead = 0; ahead < kForesight; ++ahead) {
    const auto symbol = order_.foretold(ahead);
    if (!symbol) break;
    if (*symbol == kEndOfStep) {
      if (!some_frozen) break;
      in_this_step = false;  // beyond it only frozen units are still there
      continue;
    }
    auto& use = next[unit_of(*symbol)];
    if (use == kNotForeseen && (in_this_step || frozen[unit_of(*symbol)])) use = ahead;
  }
  return next;
}

// The units that could be freed and are not expected within `later_than` accesses.
std::vector<Unit*> Scheduler::by_falling_next_use(size_t later_than) const {
  const auto next = next_uses();
  std::vector<Unit*> candidates;
  for (const auto& unit : units_)
    if (!unit->is_root() && unit->state != BufferState::ABSENT && !unit->pins && !unit->wanted && next[unit->index] >= later_than)
      candidates.push_back(unit.get());
  std::stable_sort(candidates.begin(), candidates.end(), [&](const Unit* a, const Unit* b) {
    return next[a->index] != next[b->index] ? next[a->index] > next[b->index] : a->last_use < b->last_use;
  });
  return candidates;
}

}  // namespace fsdp
