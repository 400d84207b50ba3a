#include "comm/order_memory.h"

namespace fsdp::comm {

namespace {

uint64_t mix(uint64_t hash, uint64_t value) {  // the finalizer of splitmix64 (Steele, Lea, Flood 2014)
  uint64_t x = hash * 31 + value + 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

std::optional<OrderMemory::Symbol> OrderMemory::foretold(size_t ahead) const {
  if (place_ == kNowhere || place_ + ahead >= history_.size()) return std::nullopt;
  return history_[place_ + ahead];
}

void OrderMemory::append(Symbol symbol) {
  const bool expected = foretold() == symbol;
  history_.push_back(symbol);
  if (expected) {
    ++place_;
  } else {
    place_ = kNowhere;
    for (size_t i = 0; i < kContexts.size() && place_ == kNowhere; ++i) {
      if (history_.size() < kContexts[i]) continue;
      const auto found = after_.find(context(kContexts[i]));
      if (found != after_.end()) place_ = found->second;
    }
  }
  index_end();
  if (history_.size() >= 2 * kRemembered) forget_older_half();
}

uint64_t OrderMemory::context(size_t length) const {
  uint64_t hash = length;
  for (size_t i = history_.size() - length; i < history_.size(); ++i) hash = mix(hash, history_[i]);
  return hash;
}

void OrderMemory::index_end() {
  for (const size_t length : kContexts)
    if (history_.size() >= length) after_[context(length)] = history_.size();
}

void OrderMemory::forget_older_half() {
  const std::vector<Symbol> kept(history_.end() - kRemembered, history_.end());
  place_ = place_ != kNowhere && place_ >= history_.size() - kRemembered ? place_ - (history_.size() - kRemembered) : kNowhere;
  history_.clear();
  after_.clear();
  for (const Symbol symbol : kept) {
    history_.push_back(symbol);
    index_end();
  }
}

}  // namespace fsdp::comm
