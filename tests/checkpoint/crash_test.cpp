// A save that ends anywhere, or meets a disk that fails anywhere, leaves the checkpoints that were there, the new one, or both; never a
// mixture.
#include <fsdp/fsdp.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>

#include "support/expect_contains.h"
#include "support/faulty_files.h"
#include "support/models.h"
#include "support/ranks.h"
#include "support/shared_folder.h"

using namespace fsdp::testing;
namespace fs = std::filesystem;
namespace nn = torch::nn;

namespace {

// A model whose parameters all are one number, so that a mixture of two checkpoints would show.
struct Run {
  explicit Run(const fsdp::ProcessGroup& group) : net(8), model(net, group), optimizer(model) {}

  void become(double value) {
    const torch::NoGradGuard no_grad;
    const auto whole = model.summon_full_params({.write_back = true});
    for (auto& parameter : net->parameters()) parameter.fill_(value);
  }
  // What all parameters are; fails where they differ.
  double value() {
    const auto whole = model.summon_full_params();
    std::optional<double> value;
    for (const auto& parameter : net->parameters()) {
      const double least = parameter.min().item<double>(), most = parameter.max().item<double>();
      EXPECT(least == most && (!value || *value == least), "a mixture: " << least << " and " << most);
      value = least;
    }
    return *value;
  }
  // With `value` in all parameters, and said in the checkpoint's text.
  void save(const std::string& root, int64_t step, double value) {
    become(value);
    save_as_it_is(root, step, value);
  }
  void save_as_it_is(const std::string& root, int64_t step, double value) {
    fsdp::save_checkpoint(root, step, model, optimizer, std::to_string(value), {.keep_last = 2});
  }

  Mlp net;
  fsdp::FullyShardedDataParallel<MlpImpl> model;
  fsdp::AdamW optimizer;
};

// What lies under final names must be sound.
void expect_sound(Run& run, const std::string& root, double least, const std::string& what) {
  size_t found = 0;
  for (const auto& entry : fs::directory_iterator(root)) {
    if (!entry.path().filename().string().starts_with("step-")) continue;
    const auto loaded = fsdp::load_checkpoint(entry.path(), run.model, run.optimizer);
    EXPECT(loaded && run.value() == std::stod(loaded->extra), what << ": " << entry.path() << " has other values");
    ++found;
  }
  const auto newest = fsdp::load_checkpoint(root, run.model, run.optimizer);
  EXPECT(found > 0 && newest && run.value() >= least, what << ": what was saved before is gone");
}

}  // namespace

RANKS_TEST("a process that ends at any write, fsync or rename of a save leaves whole checkpoints", "[checkpoint][crash]", 1) {
  const SharedFolder folder(group);
  Run run(group);
  // Beside the checkpoint of another step, and in place of one of the same.
  for (const bool same_step : {false, true}) {
    const auto root = folder / (same_step ? "same" : "other");
    int64_t calls = 1;
    for (int64_t end = 1; end <= calls; ++end) {
      fs::remove_all(root);
      run.save(root, 1, 1);
      if (same_step) run.save(root, 2, 2);
      run.become(2.5);
      const pid_t child = ::fork();
      if (child == 0) {
        const ArmedFaults faults({.end_process_at = end});
        run.save_as_it_is(root, 2, 2.5);
        _exit(0);
      }
      int status = 0;
      ::waitpid(child, &status, 0);
      EXPECT(WIFEXITED(status), "the child was ended by signal " << WTERMSIG(status));
      const bool ended = WEXITSTATUS(status) == kEnded;
      expect_sound(run, root, same_step ? 2 : 1, "ended at call " + std::to_string(end));
      if (ended) calls = end + 1;
      run.save(root, 3, 3);  // the next save works, and clears away
      for (const auto& entry : fs::directory_iterator(root))
        EXPECT(entry.path().filename().string().starts_with("step-"), entry.path() << " was left behind");
      expect_sound(run, root, 3, "after the next save");
    }
    EXPECT(calls > 15, "only " << calls << " calls were tried");
  }
}

RANKS_TEST("a disk that fails at any call, or is full at any byte, is an error, and the next save works", "[checkpoint][crash]", 1, 2) {
  const SharedFolder folder(group);
  Run run(group);
  run.save(folder.path(), 1, 1);
  run.become(2);
  int64_t calls = 0, bytes = 0;
  {
    const ArmedFaults counted({});
    run.save_as_it_is(folder / "counted", 2, 2);
    calls = counted.calls();
    bytes = counted.bytes();
  }
  const auto all_calls =
      fsdp::sum_over_ranks(group, {static_cast<double>(group.rank() == 0 ? calls : 0), static_cast<double>(group.rank() == 0 ? bytes : 0)});
  const auto expect_failure = [&](const FileFaults& faults, const std::string& text, const std::string& what) {
    std::string error;
    {
      const ArmedFaults armed(group.rank() == 0 ? faults : FileFaults{});
      try {
        run.save_as_it_is(folder.path(), 2, 2);
      } catch (const c10::Error& refused) {
        error = refused.what_without_backtrace();
      }
    }
    EXPECT(error.find(text) != std::string::npos, what << ": expected '" << text << "' in '" << error << "'");
    EXPECT(error.find(folder.path()) != std::string::npos, what << ": the path is missing in " << error);
    group.barrier();
    for (const auto& entry : fs::directory_iterator(folder.path()))
      EXPECT(entry.path().filename() == "step-00000001" || entry.path().filename() == "counted", what << " left " << entry.path());
    group.barrier();
  };
  const auto count = static_cast<int64_t>(all_calls[0]);
  EXPECT(count > 5, count << " calls");
  // The last brings the folder above to the disk, when the checkpoint has its name already.
  for (int64_t at = 1; at < count; ++at)
    expect_failure({.fail_at = at, .error = EIO}, "Input/output error", "EIO at call " + std::to_string(at));
  for (int i = 0; i < 50; ++i)
    expect_failure({.disk_bytes = static_cast<int64_t>(all_calls[1]) * i / 50}, "bytes were to be written, ",
                   "a disk of " + std::to_string(i) + " fiftieths");
  {
    const ArmedFaults armed({.short_writes = true});
    run.save_as_it_is(folder.path(), 2, 2);
  }
  expect_sound(run, folder.path(), 2, "with short and interrupted writes");
}
