// A sequence that tends to repeat itself, and how it is expected to go on.
//
// Steps of training make the same accesses and collectives again and again, with evaluation or generation in between. The memory
// keeps what has happened and a place in it that fits what happened last; what followed there is foretold to follow now. After a
// surprise the place is sought anew by the last few symbols, the longest run of them that has been seen before. So several orders
// live side by side, and going back to one costs a single surprise.
//
// What is foretold depends on the sequence of appended symbols alone: ranks that have appended the same foresee the same.
//
// Thread safety: one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace fsdp::comm {

class OrderMemory {
 public:
  using Symbol = uint64_t;

  void append(Symbol symbol);

  // The symbol `ahead` places behind the next one; nothing where the past does not say.
  std::optional<Symbol> foretold(size_t ahead = 0) const;

 private:
  // Older symbols are forgotten; an order that takes longer to repeat is never recognised.
  static constexpr size_t kRemembered = 1 << 16;
  static constexpr std::array<size_t, 4> kContexts{8, 4, 2, 1};
  static constexpr size_t kNowhere = SIZE_MAX;

  uint64_t context(size_t length) const;  // hash of the last `length` symbols
  void index_end();
  void forget_older_half();

  std::vector<Symbol> history_;
  std::unordered_map<uint64_t, size_t> after_;  // context → the place behind its latest occurrence
  size_t place_ = kNowhere;                     // of the symbol that is expected next
};

}  // namespace fsdp::comm
