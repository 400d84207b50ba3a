// How a rank that waits learns that the group has failed elsewhere, and tells the others when it failed here.
//
// Gloo tells the direct peers of a dead rank. The rest would wait for those peers until the timeout: so whoever fails leaves a note
// on the board, and whoever waits looks there between slices of its wait. Where the board itself is gone, since the process that
// served it died, that is the failure.
#pragma once

#include "comm/board.h"
#include "comm/handshake.h"

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
  FailureWatch(std::unique_ptr<Board> board, std::vector<Member> members, int rank);

  Board& board() { return *board_; }

  // Throws c10::Error when another rank left a note, or when the board has been gone for a second (a rank that has finished and left
  // takes it along as well, while what it sent is still arriving). Waits two milliseconds for the board's answer; one that comes
  // later is evaluated by the next look.
  void look();

  // Throws when a process that contradicts the group came just after the handshake, but only in the first seconds of the group: later
  // ones are a mistake made elsewhere, and no reason to end a group that works.
  void look_while_young();

  // Throws when a member on this host is gone: for waits that nobody would end, since no connection to it exists yet.
  void look_for_members() const;

  // What is known about the cause of an error here, to be appended to its text: members on this host that are gone
  // or stopped, and the note of another rank.
  std::string explain();

  // Leaves a note unless there is one. A best effort.
  void report(const std::string& error) noexcept;

  // After a failure. Where this process serves the board, it stays for half a second at most until the others have failed too and read
  // why: its end takes the board along. A best effort.
  void leave(bool serving) noexcept;

  void stop() noexcept;

 private:
  std::string troubles() const;

  std::unique_ptr<Board> board_;
  const std::vector<Member> members_;
  const int rank_;
  const std::chrono::steady_clock::time_point born_ = std::chrono::steady_clock::now();
  std::chrono::steady_clock::time_point looked_ = born_;
  std::future<std::optional<std::string>> answer_;
  std::optional<std::chrono::steady_clock::time_point> lost_since_;
  std::string loss_;
};

}  // namespace fsdp::comm
