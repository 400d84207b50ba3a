#include "support/worker.h"

#include "comm/collectives.h"
#include "support/rank_process.h"

#include <torch/torch.h>

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdlib>

namespace fsdp::testing {

namespace {

// A worker ends with the process that started it, however that ends. The parent may have ended before the first line: the signal
// would not come then.
void end_with_parent() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  const char* parent = std::getenv(kParentVariable);
  if (!parent || std::atoi(parent) != getppid()) _exit(3);
}

void report(const std::string& kind, const std::string& text = "") { write_message(kResultFd, {kind, text}); }

std::optional<Message> next_command(std::string& received) {
  while (true) {
    if (auto message = take_message(received)) return message;
    char buffer[4096];
    const ssize_t n = read(kCommandFd, buffer, sizeof buffer);
    if (n <= 0) return std::nullopt;
    received.append(buffer, static_cast<size_t>(n));
  }
}

std::string text_of(const std::exception& error) {
  const auto* named = dynamic_cast<const c10::Error*>(&error);
  return named ? named->what_without_backtrace() : error.what();
}

ProcessGroup join() {
  if (std::getenv(kWithoutGroup)) return ProcessGroup(comm::make_single_process());
  // Shorter than the limits of tests, so that a hang ends as an error that says where.
  return init_process_group({.timeout = std::chrono::seconds(30), .rendezvous_timeout = std::chrono::seconds(30)});
}

// What a body may leave behind in the process, set as it is at the start.
void reset_torch() {
  torch::manual_seed(0);
  at::set_num_threads(1);
  torch::GradMode::set_enabled(true);
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
}

bool run_body(ProcessGroup& group, const std::string& name) {
  try {
    reset_torch();
    find_body(name)(group);
    return true;
  } catch (const std::exception& error) {
    report("failed", text_of(error));
  } catch (...) {
    report("failed", "something that is no std::exception was thrown");
  }
  return false;
}

int pool_worker() {
  ProcessGroup group = join();
  report("ready");
  std::string received;
  while (const auto command = next_command(received)) {
    if (!run_body(group, command->text)) {
      group.close();  // the others may be waiting for this rank
      continue;
    }
    report("passed");
    // A body may end the group on purpose, or leave ranks out of step by mistake: not for the next test to find out.
    try {
      group.barrier();
      report("in_step");
    } catch (const std::exception& error) {
      report("spent", text_of(error));
    }
  }
  return 0;
}

int own_worker() {
  std::string received;
  const auto command = next_command(received);
  if (!command) return 2;
  ProcessGroup group = join();
  return run_body(group, command->text) ? 0 : 1;
}

}  // namespace

int worker_main(const std::string& mode) {
  end_with_parent();
  signal(SIGPIPE, SIG_IGN);
  try {
    at::set_num_threads(1);
    return mode == kPoolMode ? pool_worker() : own_worker();
  } catch (const std::exception& error) {
    try {
      report("failed", text_of(error));
    } catch (const std::exception&) {  // nobody is there to read it
    }
    return 1;
  }
}

}  // namespace fsdp::testing
