#include "comm/collectives.h"

#include <c10/util/Exception.h>

#include <cstdio>
#include <utility>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;

// What guarded() throws. A type of its own, so that an error which passes through two groups (a decorator and the group inside it)
// is described once.
class GroupError : public c10::Error {
 public:
  using c10::Error::Error;
};

std::string describe(const std::string& operation, const std::string& purpose) {
  return purpose.empty() ? operation : operation + " (" + purpose + ")";
}

std::string describe(const Request& request) { return describe(to_string(request.operation), request.purpose); }

// What ranks must have in common for the operation to be one.
std::string identity(const Request& request) {
  std::string text = describe(request);
  if (request.operation == Operation::BROADCAST) text += c10::str(" from rank ", request.root);
  if (request.output.defined()) text += c10::str(", ", request.output.numel(), " elements of ", request.output.scalar_type());
  return text;
}

std::string seconds_since(Clock::time_point started) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3f s", std::chrono::duration<double>(Clock::now() - started).count());
  return text;
}

void check_flat(const at::Tensor& tensor, const char* operation, const char* name, int rank) {
  TORCH_CHECK(tensor.defined(), operation, ": `", name, "` is undefined on rank ", rank);
  TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), operation, ": `", name, "` must be 1-D and contiguous, but has shape ",
              tensor.sizes(), " and strides ", tensor.strides(), " on rank ", rank);
}

void check_pair(const at::Tensor& whole, const char* whole_name, const at::Tensor& block, const char* block_name, const char* operation,
                int rank, int world_size) {
  check_flat(whole, operation, whole_name, rank);
  check_flat(block, operation, block_name, rank);
  TORCH_CHECK(whole.scalar_type() == block.scalar_type(), operation, ": `", whole_name, "` is ", whole.scalar_type(), " but `", block_name,
              "` is ", block.scalar_type(), " on rank ", rank);
  TORCH_CHECK(whole.device() == block.device(), operation, ": `", whole_name, "` is on ", whole.device(), " but `", block_name, "` is on ",
              block.device(), " on rank ", rank);
  TORCH_CHECK(whole.numel() == block.numel() * world_size, operation, ": `", whole_name, "` must have ", world_size, " times the ",
              block.numel(), " elements of `", block_name, "`, but has ", whole.numel(), " on rank ", rank);
}

std::string reason_of(const std::exception& error) {
  const auto* named = dynamic_cast<const c10::Error*>(&error);
  return named ? named->what_without_backtrace() : error.what();
}

}  // namespace

const char* to_string(Operation operation) {
  switch (operation) {
    case Operation::ALL_GATHER:
      return "all_gather";
    case Operation::REDUCE_SCATTER:
      return "reduce_scatter";
    case Operation::ALL_REDUCE:
      return "all_reduce";
    case Operation::BROADCAST:
      return "broadcast";
    case Operation::BARRIER:
      return "barrier";
  }
  return "unknown operation";
}

std::string Collectives::title() const { return c10::str("rank ", rank(), " of ", world_size()); }

std::shared_ptr<Collectives> Collectives::split(int /*color*/, int /*key*/) {
  TORCH_CHECK(false, title(), ": a group of backend '", backend(), "' cannot be split");
}

void Collectives::check_healthy(const std::string& description) const {
  TORCH_CHECK(first_error_.empty(), title(), ": ", description, " refused, since the group has failed before: ", first_error_);
}

template <class Body>
auto Collectives::guarded(const std::string& description, Clock::time_point started, Body body) {
  check_healthy(description);
  const auto fail = [&](std::string error) {
    first_error_ = std::move(error);
    failed(first_error_);
  };
  try {
    return body();
  } catch (const GroupError& error) {
    fail(error.what_without_backtrace());
    throw;
  } catch (const std::exception& error) {
    fail(c10::str(title(), ": ", description, " failed after ", seconds_since(started), ": ", reason_of(error)));
    throw GroupError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, first_error_);
  }
}

Pending Collectives::launch(Request request) {
  Pending pending;
  pending.started_ = Clock::now();
  pending.request_ = std::move(request);
  pending.work_ = guarded(describe(pending.request_), pending.started_, [&] {
    agree(identity(pending.request_));
    return start(pending.request_);
  });
  pending.group_ = shared_from_this();
  return pending;
}

void Pending::wait() {
  TORCH_CHECK(valid(), "wait on a Pending that holds no operation: it was waited for already, or never started");
  // Emptied first: whatever happens, the operation is over for the caller. `group` outlives the work, which may refer to it.
  const auto group = std::move(group_);
  const auto work = std::move(work_);
  const Request request = std::exchange(request_, {});
  group->guarded(describe(request), started_, [&] { work->wait(); });
}

Pending Collectives::all_gather(at::Tensor output, at::Tensor input, std::string purpose) {
  check_pair(output, "output", input, "input", "all_gather", rank(), world_size());
  return launch(
      {.operation = Operation::ALL_GATHER, .output = std::move(output), .input = std::move(input), .purpose = std::move(purpose)});
}

Pending Collectives::reduce_scatter(at::Tensor output, at::Tensor input, std::string purpose) {
  check_pair(input, "input", output, "output", "reduce_scatter", rank(), world_size());
  return launch(
      {.operation = Operation::REDUCE_SCATTER, .output = std::move(output), .input = std::move(input), .purpose = std::move(purpose)});
}

Pending Collectives::all_reduce(at::Tensor tensor, std::string purpose) {
  check_flat(tensor, "all_reduce", "tensor", rank());
  return launch({.operation = Operation::ALL_REDUCE, .output = std::move(tensor), .input = {}, .purpose = std::move(purpose)});
}

Pending Collectives::broadcast(at::Tensor tensor, int root, std::string purpose) {
  check_flat(tensor, "broadcast", "tensor", rank());
  TORCH_CHECK(root >= 0 && root < world_size(), "broadcast: root ", root, " is not a rank of a group of ", world_size());
  return launch({.operation = Operation::BROADCAST, .output = std::move(tensor), .input = {}, .root = root, .purpose = std::move(purpose)});
}

void Collectives::barrier() { launch({.operation = Operation::BARRIER, .output = {}, .input = {}, .purpose = ""}).wait(); }

std::vector<std::string> Collectives::exchange(const std::string& topic, const std::string& text) {
  const auto started = Clock::now();
  return guarded(describe("exchange", topic), started, [&] {
    agree(describe("exchange", topic));
    std::vector<std::string> texts = exchange_texts(topic, text);
    TORCH_INTERNAL_ASSERT(texts.size() == static_cast<size_t>(world_size()), "an exchange with ", texts.size(), " texts");
    return texts;
  });
}

}  // namespace fsdp::comm
