// fsdp-train: trains a language model from one JSON file, sharded over the ranks that it is started on:
//
//     scripts/launch -n 2 build/bin/fsdp-train --config FILE.json --set max_steps=100
//
// The keys are listed in train_config.h.
#include <fsdp/exchange.h>
#include <fsdp/process_group.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tools/train_config.h"
#include "tools/trainer.h"

namespace {

std::string read_text(const std::string& path) {
  std::ifstream file(path);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  TORCH_CHECK(file.good() || file.eof(), "--config: '", path, "' cannot be read");
  TORCH_CHECK(!text.empty(), "--config: '", path, "' is missing or empty");
  return text;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a language model from one JSON file, sharded over the ranks that it is started on.");
  std::string path;
  std::vector<std::string> overrides;
  app.add_option("--config", path, "what to do, as JSON")->required();
  app.add_option("--set", overrides, "key.sub=value, instead of what the file says; may be repeated");
  CLI11_PARSE(app, argc, argv);

  bool speaks = true;  // what is thrown on all ranks, rank 0 says
  const auto report = [&](const char* message) {
    if (speaks) std::fprintf(stderr, "fsdp-train: %s\n", message);
    return 1;
  };
  try {
    fsdp::ProcessGroup group = fsdp::init_process_group();
    speaks = group.rank() == 0;
    fsdp::tools::TrainConfig config;
    fsdp::run_on_all(group, "reading the configuration",
                     [&] { config = fsdp::tools::read_train_config(read_text(path), overrides, group.world_size()); });
    for (const int signal : {SIGINT, SIGTERM}) std::signal(signal, [](int) { fsdp::tools::request_stop(); });
    fsdp::tools::Trainer trainer(config, group);
    speaks = true;
    trainer.run();
    group.close();
    return 0;
  } catch (const c10::Error& error) {
    return report(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(error.what());
  }
}
