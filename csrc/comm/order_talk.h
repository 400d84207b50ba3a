// What ranks tell each other about their order of operations, over the board.
//
// A rank that is about to do something that was not expected asks all others what they do as operation number n, before it begins it.
// Those that do something else have begun the expected operation, which cannot end: they wait, look here between slices of the wait,
// and answer. Whoever learns of different answers throws, with all of them in the text; so every rank does. When all ranks turn to the
// same new operation, they all ask, and go on.
//
// Errors of the board are passed on, but not by look(). Thread safety: one thread at a time.
#pragma once

#include "comm/board.h"
#include "comm/order.h"

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::comm {

class OrderTalk {
 public:
  OrderTalk(std::shared_ptr<const Order> order, int rank, int world_size)
      : order_(std::move(order)), rank_(rank), world_size_(world_size) {}

  // Answers what other ranks have asked. Throws c10::Error when one is about to do something else than this rank has done.
  // Waits two milliseconds for the board; an answer that comes later is evaluated by the next call.
  void look(Board& board);

  // Says that this rank is about to do `operation` next, and asks whether the others are too. `between` is called while they have not
  // answered; it may throw. Throws c10::Error when they are not.
  template <class Between>
  void ask(Board& board, const std::string& operation, Between between) {
    begin_asking(board, operation);
    while (!all_have_answered(board)) between();
    end_asking(board);
  }

  // The last operations of every rank that answers within a moment, for an error text.
  std::string last_operations_of_all(Board& board);

 private:
  void begin_asking(Board& board, const std::string& operation);
  bool all_have_answered(Board& board);
  void end_asking(Board& board);
  void answer(Board& board, int64_t number);
  void collect(Board& board);
  [[noreturn]] void throw_disagreement() const;

  const std::shared_ptr<const Order> order_;
  const int rank_;
  const int world_size_;
  std::future<std::optional<std::string>> call_;
  int64_t asked_ = -1;                             // the number that words_ are about
  std::vector<std::optional<std::string>> words_;  // by rank
  int64_t settled_ = -1;                           // the last number about which all agreed
};

}  // namespace fsdp::comm
