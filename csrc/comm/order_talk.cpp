#include "comm/order_talk.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <thread>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr const char* kCall = "order/call";  // the number of the operation that somebody asks about, or kTell
constexpr const char* kTell = "tell";        // somebody asks for everyone's last operations
constexpr milliseconds kGlance{2};
constexpr milliseconds kOthersAnswer{1000};  // they wait in slices of some 20 ms, or are about to
constexpr milliseconds kTelling{300};

std::string word_key(int64_t number, int rank) { return c10::str("order/", number, "/", rank); }
std::string tell_key(int rank) { return c10::str("order/last/", rank); }

std::optional<int64_t> number_in(const std::optional<std::string>& call) {
  if (!call || *call == kTell) return std::nullopt;
  return std::stoll(*call);
}

}  // namespace

void OrderTalk::look(Board& board) {
  if (!call_.valid()) call_ = board.start_read(kCall);
  if (call_.wait_for(kGlance) != std::future_status::ready) return;
  std::optional<std::string> call;
  try {
    call = call_.get();
  } catch (const std::exception&) {
    return;  // the board is gone: who looks for failures finds that
  }
  if (call == kTell) {
    board.set(tell_key(rank_), order_->last_operations());
  } else if (const auto number = number_in(call); number && *number > settled_ && *number < order_->size()) {
    answer(board, *number);
  }
}

// Somebody is about to do something else than this rank has begun as operation `number`.
void OrderTalk::answer(Board& board, int64_t number) {
  asked_ = number;
  words_.assign(world_size_, std::nullopt);
  words_[rank_] = order_->at(number).value_or("an operation that this rank began long ago");
  board.set(word_key(number, rank_), *words_[rank_]);
  const auto until = Clock::now() + kOthersAnswer;
  while (!all_have_answered(board) && Clock::now() < until) std::this_thread::sleep_for(milliseconds(2));
  throw_disagreement();
}

void OrderTalk::begin_asking(Board& board, const std::string& operation) {
  asked_ = order_->size();
  words_.assign(world_size_, std::nullopt);
  words_[rank_] = operation;
  board.set(word_key(asked_, rank_), operation);
}

bool OrderTalk::all_have_answered(Board& board) {
  // The earliest number that is asked about is what matters: who asks about a later one has begun that operation, and answers.
  const auto call = number_in(board.read(kCall));
  if (!call || *call <= settled_ || *call > asked_) board.set(kCall, std::to_string(asked_));
  if (call && *call > settled_ && *call < asked_) answer(board, *call);
  collect(board);
  return std::all_of(words_.begin(), words_.end(), [](const auto& word) { return word.has_value(); });
}

void OrderTalk::collect(Board& board) {
  for (int other = 0; other < world_size_; ++other)
    if (!words_[other]) words_[other] = board.read(word_key(asked_, other));
}

void OrderTalk::end_asking(Board& board) {
  const bool all_alike = std::all_of(words_.begin(), words_.end(), [&](const auto& word) { return word == words_[rank_]; });
  if (!all_alike) throw_disagreement();
  // Everybody has read the words of the time before: they have gone on since.
  if (settled_ >= 0) board.remove(word_key(settled_, rank_));
  settled_ = asked_;
}

void OrderTalk::throw_disagreement() const {
  std::vector<std::pair<std::string, std::string>> ranks_by_word;  // by the first rank that says so
  for (int rank = 0; rank < world_size_; ++rank) {
    const auto word = words_[rank].value_or("nothing that it has told (it neither waits for the others nor begins an operation)");
    const auto known = std::find_if(ranks_by_word.begin(), ranks_by_word.end(), [&](const auto& entry) { return entry.first == word; });
    if (known == ranks_by_word.end())
      ranks_by_word.emplace_back(word, c10::str("rank ", rank));
    else
      known->second += c10::str(" and ", rank);
  }
  std::string text;
  for (const auto& [word, ranks] : ranks_by_word) text += c10::str(text.empty() ? "" : "; ", ranks, ": ", word);
  TORCH_CHECK(false, "the ranks do different things. Operation #", asked_, " of the group is, by rank: ", text,
              ". All ranks must run the same units in the same order, and make the same calls on wrapper and group; look for a branch that "
              "depends on rank or data, for an exception that one rank caught, and for batches that one rank has more of. "
              "FsdpOptions::check_order = CheckOrder::ORDER_ALWAYS finds the first difference");
}

std::string OrderTalk::last_operations_of_all(Board& board) {
  if (board.start_read(kCall).wait_for(kTelling) != std::future_status::ready) return "";  // whoever serves the board has stopped
  board.set(kCall, kTell);
  std::vector<std::optional<std::string>> told(world_size_);
  told[rank_] = order_->last_operations();
  const auto until = Clock::now() + kTelling;
  while (Clock::now() < until && !std::all_of(told.begin(), told.end(), [](const auto& t) { return t.has_value(); })) {
    std::this_thread::sleep_for(milliseconds(10));
    for (int other = 0; other < world_size_; ++other)
      if (!told[other]) told[other] = board.read(tell_key(other));
  }
  std::string text;
  for (int rank = 0; rank < world_size_; ++rank)
    text += c10::str("\nlast operations of rank ", rank, ": ",
                     told[rank] ? "\n" + *told[rank] : "it does not answer, so it waits for no other rank");
  return text;
}

}  // namespace fsdp::comm
