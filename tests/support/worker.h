// The worker's side of the rank pool: what this executable does when it is started as a rank.
#pragma once

#include "support/ranks.h"

#include <string>

namespace fsdp::testing {

inline constexpr const char* kWorkerFlag = "--rank-worker";  // argv[1] of a worker; argv[2] is the mode
inline constexpr const char* kPoolMode = "pool";             // joins a group, then runs bodies by name until commands end
inline constexpr const char* kOwnMode = "own";               // joins a group, runs one body, exits
inline constexpr const char* kParentVariable = "FSDP_TEST_PARENT";
// High numbers, so that moving a pipe there cannot overwrite the other one.
inline constexpr int kCommandFd = 198;
inline constexpr int kResultFd = 199;

// Messages, main → worker: run <name>. Worker → main: ready, passed, failed <text>, in_step, spent <text>.
int worker_main(const std::string& mode);

RankBody find_body(const std::string& name);  // throws where nothing has that name

}  // namespace fsdp::testing
