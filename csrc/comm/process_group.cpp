#include <fsdp/process_group.h>

#include "comm/collectives.h"
#include "comm/environment.h"
#include "comm/gloo.h"
#include "comm/handshake.h"
#include "comm/rendezvous.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp {

namespace {

void check_options(const ProcessGroupOptions& options) {
  TORCH_CHECK(options.backend == "auto" || options.backend == "gloo", "ProcessGroupOptions::backend is '", options.backend,
              "'; known are 'auto' and 'gloo'");
  TORCH_CHECK(options.timeout.count() > 0, "ProcessGroupOptions::timeout must be positive, but is ", options.timeout.count(), " ms");
  TORCH_CHECK(options.rendezvous_timeout.count() > 0, "ProcessGroupOptions::rendezvous_timeout must be positive, but is ",
              options.rendezvous_timeout.count(), " ms");
}

std::shared_ptr<comm::Collectives> join(const comm::Environment& environment, const ProcessGroupOptions& options) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLeastForConnecting{1000};
  const auto started = Clock::now();
  comm::Meeting meeting =
      comm::meet(environment, comm::this_process(environment.rank, environment.world_size, "gloo"), options.rendezvous_timeout);
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started);
  return comm::make_gloo(std::move(meeting), options.timeout, std::max(options.rendezvous_timeout - passed, kLeastForConnecting));
}

}  // namespace

ProcessGroup::ProcessGroup(std::shared_ptr<comm::Collectives> collectives) : collectives_(std::move(collectives)) {
  TORCH_CHECK(collectives_, "a ProcessGroup needs collectives");
}

int ProcessGroup::rank() const { return collectives_->rank(); }
int ProcessGroup::world_size() const { return collectives_->world_size(); }
const std::string& ProcessGroup::backend() const { return collectives_->backend(); }
void ProcessGroup::barrier() { collectives_->barrier(); }
void ProcessGroup::close() { collectives_->close(); }

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  check_options(options);
  const comm::Environment environment = comm::read_environment(options);
  if (environment.world_size == 1) return ProcessGroup(comm::make_single_process());
  try {
    return ProcessGroup(join(environment, options));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "init_process_group, rank ", environment.rank, " of ", environment.world_size, ": ", error.what_without_backtrace());
  }
}

}  // namespace fsdp
