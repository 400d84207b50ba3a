// The operations of a group, in the order in which this rank has begun them, and whether the next one is what the past foretells.
//
// Ranks append the same operations, agreed upon one by one, so they foresee the same: a rank that is about to do what is expected need
// not ask the others. Operations are numbered from 0.
//
// Thread safety: one thread at a time.
#pragma once

#include "comm/order_memory.h"

#include <cstdint>
#include <deque>
#include <optional>
#include <string>

namespace fsdp::comm {

class Order {
 public:
  enum class Outlook {
    UNKNOWN,   // nothing is foretold, on any rank
    EXPECTED,  // this operation is foretold
    SURPRISE,  // another one is
  };

  Outlook outlook(const std::string& operation) const;
  void append(const std::string& operation);

  int64_t size() const { return size_; }
  std::optional<std::string> at(int64_t number) const;  // nothing for operations too long ago, or not begun
  std::string last_operations() const;                  // the newest last, one a line

 private:
  static constexpr size_t kKept = 64, kShown = 8;

  OrderMemory memory_;
  int64_t size_ = 0;
  std::deque<std::string> kept_;  // the last ones
};

uint64_t hash_of_operation(const std::string& operation);  // the same in every process

}  // namespace fsdp::comm
