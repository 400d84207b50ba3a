// What one optimizer step costs over many small tensors, in one process: torch::optim::AdamW over a plain model, the same over a wrapped
// one, and fsdp::AdamW over a wrapped one, in alternating rounds.
//
//   optimizer_step [--tensors 300] [--numel 256] [--rounds 200] [--threads 1] [--json FILE]

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "statistics.h"

namespace {

using Clock = std::chrono::steady_clock;

// Weights and biases in turn, as in a model of Linear layers.
struct ManyTensors : torch::nn::Module {
  ManyTensors(int count, int64_t numel) {
    for (int i = 0; i < count; ++i) register_parameter((i % 2 ? "bias" : "weight") + std::to_string(i), torch::ones({numel}));
  }
  torch::Tensor forward() {
    torch::Tensor sum;
    for (const auto& parameter : parameters()) sum = sum.defined() ? sum + parameter.square().sum() : parameter.square().sum();
    return sum;
  }
};

template <class Function>
double us_of(Function f) {
  const auto start = Clock::now();
  f();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count();
}

struct Contestant {
  const char* name;
  std::function<void()> step;
  std::vector<double> us = {}, ratios = {};  // ratios: torch::optim's time over the wrapped model by this one's, round by round
};

}  // namespace

int main(int argc, char** argv) {
  int tensors = 300, rounds = 200, threads = 1;
  int64_t numel = 256;
  std::string json_file;
  CLI::App app("What one optimizer step costs over many small tensors");
  app.add_option("--tensors", tensors, "parameter tensors")->check(CLI::Range(1, 100'000));
  app.add_option("--numel", numel, "elements of each")->check(CLI::Range(1, 1'000'000));
  app.add_option("--rounds", rounds, "rounds to time; each contestant steps once a round")->check(CLI::Range(2, 100'000));
  app.add_option("--threads", threads, "LibTorch's threads")->check(CLI::Range(1, 256));
  app.add_option("--json", json_file, "also write the figures there");
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(threads);

  const auto make = [&] { return std::make_shared<ManyTensors>(tensors, numel); };
  const auto group = fsdp::init_process_group();
  const auto plain = make();
  fsdp::FullyShardedDataParallel wrapped(make(), group), fused(make(), group), grouped(make(), group);
  torch::optim::AdamW plain_optimizer(plain->parameters(), 1e-3), wrapped_optimizer(wrapped.parameters(), 1e-3);
  fsdp::AdamW fused_optimizer(fused);
  fsdp::AdamW grouped_optimizer(
      grouped, {.groups = {{fsdp::name_contains("bias"), {}}, {{}, {}}}});  // equal options: the same numbers, from runs of one tensor each
  plain->forward().backward();
  for (auto* model : {&wrapped, &fused, &grouped}) model->forward().backward();

  std::vector<Contestant> contestants{{"torch::optim::AdamW, wrapped", [&] { wrapped_optimizer.step(); }},
                                      {"torch::optim::AdamW, plain", [&] { plain_optimizer.step(); }},
                                      {"fsdp::AdamW", [&] { fused_optimizer.step(); }},
                                      {"fsdp::AdamW, biases apart", [&] { grouped_optimizer.step(); }}};
  for (int round = -5; round < rounds; ++round) {  // five to warm up
    std::vector<double> us;
    for (auto& contestant : contestants) us.push_back(us_of(contestant.step));
    for (size_t i = 0; i < us.size() && round >= 0; ++i) {
      contestants[i].us.push_back(us[i]);
      contestants[i].ratios.push_back(us[0] / us[i]);
    }
  }
  torch::NoGradGuard no_grad;
  for (auto* model : {&wrapped, &fused, &grouped}) {
    auto full = model->summon_full_params();
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      TORCH_CHECK(torch::allclose(model->parameters()[i], plain->parameters()[i], 1e-5, 1e-6), "parameter ", i,
                  " differs from the plain run's; times of different work say nothing");
  }

  std::printf("%d tensors of %lld elements, %d threads, %d alternating rounds\n", tensors, static_cast<long long>(numel), threads, rounds);
  nlohmann::json figures = {{"tensors", tensors}, {"numel", numel}, {"rounds", rounds}, {"threads", threads}};
  for (const auto& [name, step, us, ratios] : contestants) {
    const auto at = [](const std::vector<double>& values, double q) { return benchmark::quantile(values, q); };
    std::printf("%-30s %8.1f us a step (quartiles %.1f to %.1f), %6.2f times as fast as wrapped torch::optim (%.2f to %.2f)\n", name,
                at(us, 0.5), at(us, 0.25), at(us, 0.75), at(ratios, 0.5), at(ratios, 0.25), at(ratios, 0.75));
    figures["steps"].push_back({{"name", name},
                                {"us", at(us, 0.5)},
                                {"us_quartiles", {at(us, 0.25), at(us, 0.75)}},
                                {"ratio", at(ratios, 0.5)},
                                {"ratio_quartiles", {at(ratios, 0.25), at(ratios, 0.75)}}});
  }
  if (!json_file.empty()) std::ofstream(json_file) << figures.dump(2) << "\n";
}
