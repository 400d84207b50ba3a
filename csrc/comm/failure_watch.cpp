#include "comm/failure_watch.h"

#include <c10/util/Exception.h>

#include <fstream>
#include <thread>
#include <utility>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kNote = "failed";
constexpr const char* kClosing = "closed";
constexpr milliseconds kGlance{2};  // what a look may wait for its answer, which takes a tenth of a millisecond as a rule
constexpr milliseconds kGrace{1000};
constexpr milliseconds kYoung{10'000};
constexpr milliseconds kBetweenLooks{50};
constexpr milliseconds kDying{100};  // a killed process loses its connections before it is seen to be gone
constexpr milliseconds kReport{500};
constexpr milliseconds kBetweenLooksForClosing{200};

// "gone" (also one that has ended and is not yet waited for by its parent), "stopped", or "".
std::string trouble_of(int64_t pid) {
  std::string line;
  std::getline(std::ifstream(c10::str("/proc/", pid, "/stat")), line);
  const size_t name_end = line.rfind(')');  // "123 (name) S ..."; the name may hold anything
  if (name_end == std::string::npos || name_end + 2 >= line.size()) return "gone";
  switch (line[name_end + 2]) {
    case 'Z':
    case 'X':
      return "gone";
    case 'T':
    case 't':
      return "stopped";
    default:
      return "";
  }
}

}  // namespace

FailureWatch::FailureWatch(std::unique_ptr<Board> board, std::vector<Member> members, int rank, std::shared_ptr<const Order> order)
    : board_(std::move(board)),
      members_(std::move(members)),
      rank_(rank),
      order_(std::move(order)),
      talk_(order_, rank, static_cast<int>(members_.size())) {}

void FailureWatch::look() {
  TORCH_CHECK(board_, "the group has been closed");
  if (lost_since_) {
    TORCH_CHECK(Clock::now() - *lost_since_ < kGrace, loss_, troubles());
    return;
  }
  look_for_note();
  if (lost_since_) return;
  talk_.look(*board_);
  look_for_closing();
}

void FailureWatch::look_for_note() {
  if (!answer_.valid()) answer_ = board_->start_read(kNote);
  if (answer_.wait_for(kGlance) != std::future_status::ready) return;
  std::optional<std::string> note;
  try {
    note = answer_.get();
  } catch (const std::exception&) {
    lost_since_ = Clock::now();
    loss_ = "the store through which ranks report failures is gone: the process that served it has ended or closed its group";
    return;
  }
  TORCH_CHECK(!note, *note);
}

void FailureWatch::look_for_closing() {
  const auto now = Clock::now();
  TORCH_CHECK(!closed_since_ || now - *closed_since_ < kGrace, closing_);
  if (closed_since_) return;
  if (!closing_answer_.valid() && now - looked_for_closing_ >= kBetweenLooksForClosing) {
    looked_for_closing_ = now;
    closing_answer_ = board_->start_read(kClosing);
  }
  if (!closing_answer_.valid() || closing_answer_.wait_for(milliseconds(0)) != std::future_status::ready) return;
  try {
    const auto closing = closing_answer_.get();
    if (!closing) return;
    closed_since_ = now;
    closing_ = *closing;
  } catch (const std::exception&) {  // the board is gone, which the next look for a note will find
  }
}

void FailureWatch::ask(const std::string& operation, milliseconds timeout) {
  const auto started = Clock::now();
  auto looked = started;
  const auto between = [&] {
    const auto now = Clock::now();
    if (now - looked > kBetweenLooks) {
      looked = now;
      look();
      TORCH_CHECK(now - started < timeout, "timed out: not all ranks were there within ", timeout.count() / 1000.0, " s", explain(),
                  last_operations_of_all());
    }
    if (now - started > kGlance) std::this_thread::sleep_for(milliseconds(1));
  };
  try {
    talk_.ask(*board_, operation, between);
  } catch (const c10::Error& error) {
    TORCH_CHECK(!board_->lost(), error.what_without_backtrace(), explain());
    throw;
  }
}

std::string FailureWatch::last_operations_of_all() {
  try {
    return board_ && !lost_since_ ? talk_.last_operations_of_all(*board_) : "";
  } catch (const std::exception&) {  // the board is gone
    return "";
  }
}

void FailureWatch::look_while_young() {
  const auto now = Clock::now();
  if (!board_ || lost_since_ || board_->lost() || now - born_ >= kYoung || now - looked_ < kBetweenLooks) return;
  looked_ = now;
  std::optional<std::string> found;
  try {
    found = board_->read(kContradictionKey);
  } catch (const c10::Error&) {
    return;  // whoever waits will see it
  }
  TORCH_CHECK(!found, "a process came that contradicts the group; ", *found);
}

void FailureWatch::look_for_members() const {
  for (const Member& member : members_)
    if (member.loopback == members_[rank_].loopback) TORCH_CHECK(trouble_of(member.pid) != "gone", member.to_string(), " is gone");
}

std::string FailureWatch::explain() {
  const auto until = Clock::now() + kDying;
  std::string result = troubles();
  while (result.empty() && Clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(5));
    result = troubles();
  }
  try {
    if (board_ && !lost_since_) {
      auto note = board_->start_read(kNote), closing = board_->start_read(kClosing);
      if (closing.wait_for(kReport) == std::future_status::ready) {  // so the note, asked for before, has come too
        if (const auto text = note.get()) result += "; before that, " + *text;
        if (const auto text = closing.get()) result += "; " + *text;
      }
    }
  } catch (const std::exception&) {  // the board is gone as well
  }
  return result;
}

std::string FailureWatch::troubles() const {
  std::string result;
  for (const Member& member : members_) {
    if (member.loopback != members_[rank_].loopback) continue;
    const std::string trouble = trouble_of(member.pid);
    if (!trouble.empty()) result += "; " + trouble + ": " + member.to_string();
  }
  return result;
}

void FailureWatch::report(const std::string& error) noexcept {
  try {
    if (!board_ || lost_since_ || board_->lost()) return;
    // The first failure is the one that the others should read of, not what followed from it.
    board_->start_set_once(kNote, error).wait_for(kReport);
  } catch (const std::exception&) {
  }
}

void FailureWatch::leave(bool serving) noexcept {
  const auto key = [](int rank) { return c10::str("left/", rank); };
  try {
    if (!board_ || lost_since_ || board_->lost()) return;
    board_->start_set_once(key(rank_), "").wait_for(kGlance);  // the process that serves may be the one that stopped
    const auto until = Clock::now() + kReport;
    for (size_t rank = 0; serving && rank < members_.size(); ++rank)
      while (!board_->read(key(static_cast<int>(rank))) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  } catch (const std::exception&) {
  }
}

void FailureWatch::close(bool serving) noexcept {
  try {
    if (!board_) return;
    if (!lost_since_ && !board_->lost())
      board_
          ->start_set_once(kClosing, c10::str("rank ", rank_, " has closed its group, or ended, after ", order_->size(),
                                              " operations; the last: ", order_->at(order_->size() - 1).value_or("none")))
          .wait_for(kReport);
    leave(serving);
  } catch (const std::exception&) {
  }
  board_.reset();
}

}  // namespace fsdp::comm
