// How fast a GPT trains, sharded over the ranks that it is started on, and what it takes in memory:
//
//     scripts/launch -n 2 build/bin/throughput --width 512 --depth 8
//
// Rank 0 prints a line to read and one of JSON. With --backend none the ranks do everything but communicate; what a step takes longer
// with gloo is the communication that computing did not hide. scripts/bench runs it beside the peers in peers/.
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "comm/environment.h"
#include "fused_adamw.h"
#include "gpt.h"
#include "process_facts.h"
#include "silent_collectives.h"
#include "statistics.h"
#include "workload.h"

namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;

struct Flags {
  benchmark::GptOptions model;
  int64_t batch = 4, steps = 30, warmup = 5;
  fsdp::ShardingStrategy strategy = fsdp::ShardingStrategy::FULL_SHARD;
  std::optional<int64_t> max_unsharded_bytes;
  std::string optimizer = "fused", backend = "gloo";
};

const std::map<std::string, fsdp::ShardingStrategy> kStrategies{{"FULL_SHARD", fsdp::ShardingStrategy::FULL_SHARD},
                                                                {"SHARD_GRAD_OP", fsdp::ShardingStrategy::SHARD_GRAD_OP}};

std::string name_of(fsdp::ShardingStrategy strategy) {
  return std::find_if(kStrategies.begin(), kStrategies.end(), [&](const auto& known) { return known.second == strategy; })->first;
}

fsdp::ProcessGroup make_group(const std::string& backend) {
  if (backend != "none") return fsdp::init_process_group({.backend = backend});
  const auto environment = fsdp::comm::read_environment();
  return fsdp::ProcessGroup(benchmark::make_silent(environment.rank, environment.world_size));
}

template <class Optimizer>
json run(const Flags& flags, Optimizer (*make_optimizer)(std::vector<torch::Tensor> parameters)) {
  const auto& o = flags.model;
  fsdp::ProcessGroup group = make_group(flags.backend);
  benchmark::Gpt net(o);
  benchmark::set_initial_values(*net);
  fsdp::FullyShardedDataParallel model(net, group,
                                       {.sharding_strategy = flags.strategy,
                                        .auto_wrap_policy = fsdp::module_wrap_policy<benchmark::BlockImpl>(),
                                        .max_unsharded_bytes = flags.max_unsharded_bytes});
  auto optimizer = make_optimizer(model.parameters());
  const double startup = benchmark::seconds_since_start();

  std::vector<double> losses, times;
  double processor_ms = 0;
  for (int64_t step = 0; step < flags.warmup + flags.steps; ++step) {
    if (step == flags.warmup) processor_ms = benchmark::processor_ms();
    const auto start = Clock::now();
    const auto batch = benchmark::batch_of(step, group.rank(), group.world_size(), flags.batch, o.length, o.vocabulary);
    auto loss = torch::nn::functional::cross_entropy(model(batch.input).flatten(0, 1), batch.target.flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.template item<float>());
    if (step >= flags.warmup) times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }

  processor_ms = (benchmark::processor_ms() - processor_ms) / static_cast<double>(flags.steps);

  // What is not the same on all ranks: the mean of losses, the largest of the rest.
  const json own = {{"losses", losses}, {"peak_rss_mb", benchmark::peak_resident_mb()}, {"startup_s", startup}};
  double peak_rss = 0, slowest_startup = 0;
  std::fill(losses.begin(), losses.end(), 0);
  for (const auto& text : group.collectives()->exchange("report", own.dump())) {
    const json other = json::parse(text);
    peak_rss = std::max(peak_rss, other["peak_rss_mb"].get<double>());
    slowest_startup = std::max(slowest_startup, other["startup_s"].get<double>());
    for (size_t i = 0; i < losses.size(); ++i) losses[i] += other["losses"][i].get<double>() / group.world_size();
  }
  const auto stats = model.stats();
  const auto all_steps = static_cast<double>(flags.warmup + flags.steps);
  const double median = benchmark::quantile(times, 0.5);
  return {{"system", "libfsdp"},
          {"rank", group.rank()},
          {"strategy", name_of(flags.strategy)},
          {"optimizer", flags.optimizer},
          {"backend", group.backend()},
          {"world_size", group.world_size()},
          {"parameters", model.plan().numel()},
          {"step_ms", median},
          {"step_ms_spread", benchmark::quantile(times, 0.75) - benchmark::quantile(times, 0.25)},
          {"step_processor_ms", processor_ms},
          {"tokens_per_s", static_cast<double>(group.world_size() * flags.batch * o.length) / median * 1000},
          {"prefetch_hits", static_cast<double>(stats.prefetch_hits) / all_steps},
          {"buffer_allocations", stats.buffer_allocations},
          {"peak_unsharded_bytes", stats.peak_unsharded_bytes},
          {"all_gathers", static_cast<double>(stats.collectives.all_gather.calls) / all_steps},
          {"reduce_scatters", static_cast<double>(stats.collectives.reduce_scatter.calls) / all_steps},
          {"peak_rss_mb", peak_rss},
          {"startup_s", slowest_startup},
          {"final_loss", losses.back()},
          {"losses", losses},
          {"step_times_ms", times}};
}

constexpr double kLearningRate = 1e-3, kWeightDecay = 0.01;

benchmark::FusedAdamW make_fused(std::vector<torch::Tensor> parameters) {
  return benchmark::FusedAdamW(std::move(parameters), kLearningRate, kWeightDecay);
}
torch::optim::AdamW make_torch(std::vector<torch::Tensor> parameters) {
  return torch::optim::AdamW(std::move(parameters), torch::optim::AdamWOptions(kLearningRate).weight_decay(kWeightDecay));
}

}  // namespace

int main(int argc, char** argv) try {
  Flags flags;
  CLI::App app("How fast a GPT trains, sharded over the ranks that it is started on.");
  const auto number = [&](const char* flag, int64_t& value, const char* text) {
    app.add_option(flag, value, text)->capture_default_str()->check(CLI::PositiveNumber);
  };
  number("--width", flags.model.width, "size of an embedding");
  number("--depth", flags.model.blocks, "blocks, each a unit");
  number("--heads", flags.model.heads, "attention heads; they divide the width");
  number("--batch", flags.batch, "rows per rank and step");
  number("--sequence", flags.model.length, "tokens in a row");
  number("--vocabulary", flags.model.vocabulary, "different tokens");
  number("--steps", flags.steps, "steps to time");
  number("--warmup", flags.warmup, "steps before them");
  app.add_option("--strategy", flags.strategy, "FULL_SHARD (default) or SHARD_GRAD_OP")->transform(CLI::Transformer(kStrategies));
  app.add_option("--max-unsharded-bytes", flags.max_unsharded_bytes, "budget of gathered parameters, instead of the strategy's")
      ->check(CLI::PositiveNumber);
  app.add_option("--optimizer", flags.optimizer, "fused: AdamW in one call for all parameters, as the peers; torch: torch::optim::AdamW")
      ->capture_default_str()
      ->check(CLI::IsMember({"fused", "torch"}));
  app.add_option("--backend", flags.backend, "gloo, or none: nothing is communicated")
      ->capture_default_str()
      ->check(CLI::IsMember({"gloo", "none"}));
  CLI11_PARSE(app, argc, argv);

  const json report = flags.optimizer == "fused" ? run(flags, make_fused) : run(flags, make_torch);
  if (report["rank"] == 0) {
    std::printf(
        "libfsdp %s, %s, %s AdamW, %d ranks, %ld parameters: %.1f ms a step (quartiles %.1f apart), %.0f tokens/s, loss %.4f\n"
        "  %.2f all-gathers a step, most unsharded at once %.2f MB, most resident %.0f MB a rank, first step after %.1f s\n",
        report["strategy"].get<std::string>().c_str(), report["backend"].get<std::string>().c_str(),
        report["optimizer"].get<std::string>().c_str(), report["world_size"].get<int>(), report["parameters"].get<long>(),
        report["step_ms"].get<double>(), report["step_ms_spread"].get<double>(), report["tokens_per_s"].get<double>(),
        report["final_loss"].get<double>(), report["all_gathers"].get<double>(), report["peak_unsharded_bytes"].get<double>() / 1e6,
        report["peak_rss_mb"].get<double>(), report["startup_s"].get<double>());
    std::printf("%s\n", report.dump().c_str());
  }
  return 0;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "throughput: %s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "throughput: %s\n", error.what());
  return 1;
}
