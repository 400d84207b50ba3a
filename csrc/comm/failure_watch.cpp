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
constexpr milliseconds kGlance{2};  // what a look may wait for its answer, which takes a tenth of a millisecond as a rule
constexpr milliseconds kGrace{1000};
constexpr milliseconds kYoung{10'000};
constexpr milliseconds kBetweenLooks{50};
constexpr milliseconds kDying{100};  // a killed process loses its connections before it is seen to be gone
constexpr milliseconds kReport{500};

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

FailureWatch::FailureWatch(std::unique_ptr<Board> board, std::vector<Member> members, int rank)
    : board_(std::move(board)), members_(std::move(members)), rank_(rank) {}

void FailureWatch::look() {
  TORCH_CHECK(board_, "the group has been closed");
  if (lost_since_) {
    TORCH_CHECK(Clock::now() - *lost_since_ < kGrace, loss_, troubles());
    return;
  }
  if (!answer_.valid()) answer_ = board_->start_read(kNote);
  if (answer_.wait_for(kGlance) != std::future_status::ready) return;
  std::optional<std::string> note;
  try {
    note = answer_.get();
  } catch (const std::exception&) {
    lost_since_ = Clock::now();
    loss_ = "the store through which ranks report failures is gone, and so is the process that served it";
    return;
  }
  TORCH_CHECK(!note, *note);
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
      auto note = board_->start_read(kNote);
      if (note.wait_for(kReport) == std::future_status::ready)
        if (const auto text = note.get()) result += "; before that, " + *text;
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
  const auto key = [](int rank) { return c10::str("left_failed/", rank); };
  try {
    if (!board_ || lost_since_ || board_->lost()) return;
    board_->start_set_once(key(rank_), "").wait_for(kGlance);  // the process that serves may be the one that stopped
    const auto until = Clock::now() + kReport;
    for (size_t rank = 0; serving && rank < members_.size(); ++rank)
      while (!board_->read(key(static_cast<int>(rank))) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(5));
  } catch (const std::exception&) {
  }
}

void FailureWatch::stop() noexcept { board_.reset(); }

}  // namespace fsdp::comm
