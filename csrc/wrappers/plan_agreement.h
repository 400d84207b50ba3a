// Do all ranks wrap the same model in the same way?
#pragma once

#include <fsdp/options.h>
#include <fsdp/plan.h>

#include "comm/collectives.h"

namespace fsdp {

// All ranks must call, also one that found that it cannot wrap: `refusal` says why (empty: it can). Throws c10::Error on all ranks when
// one refuses, or when plans or options differ: who has what, for the first differences. Nothing is communicated at world size 1.
void agree_on_plan(comm::Collectives& collectives, const Plan& plan, const FsdpOptions& options, const std::string& refusal);

}  // namespace fsdp
