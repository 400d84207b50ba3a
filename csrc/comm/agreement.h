// Telling the other ranks, also that one cannot go on.
#pragma once

#include <c10/util/Exception.h>

#include <string>
#include <string_view>
#include <vector>

#include "comm/collectives.h"

namespace fsdp::comm {

// XXH3 of the bytes, 128 bits in hexadecimal: for comparing what is too long to exchange.
std::string hash_of(std::string_view bytes);

// Why a rank cannot go on, in words that the others can be told: what `body` throws, or "".
template <class Body>
std::string refusal_of(Body body) {
  try {
    body();
    return "";
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {  // of a predicate or policy of the user's
    return error.what();
  }
}

// Every rank's text, in rank order. All ranks must call, also one that found that it cannot go on: `refusal` says why (empty: it can), is
// thrown here, and reaches the others as "another rank cannot `action`: ...". At world size 1 nothing is communicated and there are no
// texts to compare: returns an empty list.
std::vector<std::string> exchange_or_refuse(Collectives& collectives, const std::string& topic, const std::string& text,
                                            const std::string& refusal, const char* action);

}  // namespace fsdp::comm
