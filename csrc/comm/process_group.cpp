#include <fsdp/process_group.h>

#include "comm/collectives.h"
#include "comm/environment.h"
#include "comm/gloo_backend.h"
#include "comm/handshake.h"
#include "comm/nccl.h"
#include "comm/rendezvous.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>

namespace fsdp {

namespace {

void check_options(const ProcessGroupOptions& options) {
  TORCH_CHECK(options.backend == "auto" || options.backend == "gloo" || options.backend == "nccl", "ProcessGroupOptions::backend is '",
              options.backend, "'; known are 'auto', 'gloo' and 'nccl'");
  TORCH_CHECK(options.timeout.count() > 0, "ProcessGroupOptions::timeout must be positive, but is ", options.timeout.count(), " ms");
  TORCH_CHECK(options.rendezvous_timeout.count() > 0, "ProcessGroupOptions::rendezvous_timeout must be positive, but is ",
              options.rendezvous_timeout.count(), " ms");
  if (!options.device) return;
  TORCH_CHECK(options.device->is_cpu() || options.device->is_cuda(), "ProcessGroupOptions::device is ", *options.device,
              "; groups are for cpu and cuda");
  const char* other = options.device->is_cuda() ? "gloo" : "nccl";
  TORCH_CHECK(options.backend != other, "ProcessGroupOptions::device is ", *options.device, ", which the backend '", other,
              "' does not serve; leave the backend 'auto'");
}

c10::Device device_of(const ProcessGroupOptions& options, const comm::Environment& environment) {
  c10::Device device = options.device.value_or(options.backend == "nccl" ? c10::kCUDA : c10::kCPU);
  if (device.is_cpu() || device.has_index()) return device;
  TORCH_CHECK(environment.local_rank || environment.world_size == 1, "ProcessGroupOptions asks for a CUDA device without an index, and no ",
              "local rank is known to choose one by: set LOCAL_RANK, or give the device as cuda:0");
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank.value_or(0))};
}

std::shared_ptr<comm::Collectives> join(const comm::Environment& environment, const ProcessGroupOptions& options) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kLeastForConnecting{1000};
  const c10::Device device = device_of(options, environment);
  const comm::MakeBackend make = device.is_cuda() ? comm::nccl_on(device) : comm::make_gloo;
  if (environment.world_size == 1) return comm::make_single_process();
  const auto started = Clock::now();
  const comm::Member self = comm::this_process(environment.rank, environment.world_size, device.is_cuda() ? "nccl" : "gloo");
  comm::Meeting meeting = comm::meet(environment, self, options.rendezvous_timeout);
  const auto passed = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started);
  return comm::connect_members(std::move(meeting), make, options.timeout,
                               std::max(options.rendezvous_timeout - passed, kLeastForConnecting));
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

std::optional<ProcessGroup> ProcessGroup::split(int color, int key) {
  auto part = collectives_->split(color, key);
  return part ? std::optional<ProcessGroup>(std::move(part)) : std::nullopt;
}

ProcessGroup ProcessGroup::take_over(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                                     std::chrono::milliseconds timeout) {
  TORCH_CHECK(backend, "ProcessGroup::take_over: `backend` is null");
  TORCH_CHECK(store, "ProcessGroup::take_over: `store` is null");
  TORCH_CHECK(timeout.count() > 0, "ProcessGroup::take_over: `timeout` must be positive, but is ", timeout.count(), " ms");
  const int rank = backend->getRank(), world_size = backend->getSize();
  try {
    comm::Meeting meeting = comm::meet_at(store, comm::this_process(rank, world_size, backend->getBackendName()), timeout);
    return ProcessGroup(comm::take_over_backend(std::move(meeting), std::move(backend), timeout));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "ProcessGroup::take_over, rank ", rank, " of ", world_size, ": ", error.what_without_backtrace());
  }
}

ProcessGroup init_process_group(const ProcessGroupOptions& options) {
  check_options(options);
  const comm::Environment environment = comm::read_environment(options);
  try {
    return ProcessGroup(join(environment, options));
  } catch (const c10::Error& error) {
    TORCH_CHECK(false, "init_process_group, rank ", environment.rank, " of ", environment.world_size, ": ", error.what_without_backtrace());
  }
}

}  // namespace fsdp
