// How a rank that waits learns that the group has failed elsewhere, and tells the others when it failed here.
//
// Gloo tells the direct peers of a dead rank. The rest would wait for those peers until the timeout: so whoever fails leaves a note
// on the board, and whoever waits looks there between slices of its wait. Where the board itself is gone, since the process that
// served it died, that is the failure. A rank that closes its group says so as well: who waits for it learns that it will not come.
// Between slices of a wait ranks also answer what others ask about the order of operations (order_talk.h).
#pragma once

#include "comm/board.h"
#include "comm/handshake.h"
#include "comm/order_talk.h"

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace fsdp::comm {

class FailureWatch {
 public:
  // `members` in rank order.
  FailureWatch(std::unique_ptr<Board> board, std::vector<Member> members, int rank, std::shared_ptr<const Order> order);

  Board& board() { return *board_; }

  // Throws c10::Error when another rank left a note or is about to begin another operation than this rank has begun, or when, for a
  // second, a rank has closed its group or the board has been gone (what a rank that has finished sent may still be arriving). Waits a
  // few milliseconds for the board's answers; one that comes later is evaluated by the next look.
  void look();

  // Returns when all ranks have asked about the same operation as their next; throws when one is about to do another, or fails.
  void ask(const std::string& operation, std::chrono::milliseconds timeout);

  // Throws when a process that contradicts the group came just after the handshake, but only in the first seconds of the group: later
  // ones are a mistake made elsewhere, and no reason to end a group that works.
  void look_while_young();

  // Throws when a member on this host is gone: for waits that nobody would end, since no connection to it exists yet.
  void look_for_members() const;

  // What is known about the cause of an error here, to be appended to its text: members on this host that are gone
  // or stopped, who has closed the group, and the note of another rank.
  std::string explain();
  std::string last_operations_of_all();  // likewise, where a wait has timed out

  // Leaves a note unless there is one. A best effort.
  void report(const std::string& error) noexcept;

  // Where this process serves the board, it stays for half a second at most until the others have left too and, after a failure, have
  // read why: its end takes the board along. A best effort.
  void leave(bool serving) noexcept;

  // Says that this rank will begin no further operation, and leaves.
  void close(bool serving) noexcept;

 private:
  void look_for_note();
  void look_for_closing();
  std::string troubles() const;

  std::unique_ptr<Board> board_;
  const std::vector<Member> members_;
  const int rank_;
  const std::shared_ptr<const Order> order_;
  OrderTalk talk_;
  const std::chrono::steady_clock::time_point born_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point looked_ = born_;
  std::future<std::optional<std::string>> answer_;
  std::optional<std::chrono::steady_clock::time_point> lost_since_;
  std::string loss_;
  std::chrono::steady_clock::time_point looked_for_closing_ = born_;
  std::future<std::optional<std::string>> closing_answer_;
  std::optional<std::chrono::steady_clock::time_point> closed_since_;
  std::string closing_;
};

}  // namespace fsdp::comm
