#include "comm/order.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

namespace fsdp::comm {

uint64_t hash_of_operation(const std::string& operation) {  // FNV-1a, http://www.isthe.com/chongo/tech/comp/fnv/
  uint64_t hash = 0xcbf29ce484222325;
  for (const char c : operation) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

Order::Outlook Order::outlook(const std::string& operation) const {
  const auto expected = memory_.foretold();
  if (!expected) return Outlook::UNKNOWN;
  return *expected == hash_of_operation(operation) ? Outlook::EXPECTED : Outlook::SURPRISE;
}

void Order::append(const std::string& operation) {
  memory_.append(hash_of_operation(operation));
  ++size_;
  kept_.push_back(operation);
  if (kept_.size() > kKept) kept_.pop_front();
}

std::optional<std::string> Order::at(int64_t number) const {
  const int64_t first = size_ - static_cast<int64_t>(kept_.size());
  if (number < first || number >= size_) return std::nullopt;
  return kept_[static_cast<size_t>(number - first)];
}

std::string Order::last_operations() const {
  if (size_ == 0) return "none yet";
  std::string text;
  for (int64_t number = std::max<int64_t>(0, size_ - static_cast<int64_t>(kShown)); number < size_; ++number)
    text += c10::str(text.empty() ? "" : "\n", "#", number, " ", at(number).value_or("?"));
  return text;
}

}  // namespace fsdp::comm
