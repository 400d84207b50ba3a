// What wrapping costs where it can save nothing: one process, the same GPT step plain and wrapped, in alternating pairs; and the time
// to wrap a model of many small tensors.
//
//   wrapping_overhead [--pairs 30] [--threads 2] [--json FILE]

#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "gpt.h"
#include "statistics.h"

namespace {

using Clock = std::chrono::steady_clock;

double ms_since(Clock::time_point start) { return std::chrono::duration<double, std::milli>(Clock::now() - start).count(); }

struct ManyTensors : torch::nn::Module {
  explicit ManyTensors(int count) {
    for (int i = 0; i < count; ++i) register_parameter("p" + std::to_string(i), torch::ones({8}));
  }
};

}  // namespace

int main(int argc, char** argv) {
  int pairs = 30, threads = 2, tensors = 10'000;
  std::string json_file;
  CLI::App app("What wrapping costs in one process");
  app.add_option("--pairs", pairs, "alternating pairs of steps to time")->check(CLI::Range(2, 10'000));
  app.add_option("--threads", threads, "LibTorch's threads")->check(CLI::Range(1, 256));
  app.add_option("--json", json_file, "also write the figures there");
  CLI11_PARSE(app, argc, argv);
  torch::set_num_threads(threads);

  const benchmark::GptOptions options;
  torch::manual_seed(1);
  benchmark::Gpt plain(options), net(options);
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < plain->parameters().size(); ++i) net->parameters()[i].copy_(plain->parameters()[i]);
  }
  torch::optim::AdamW plain_optimizer(plain->parameters(), 1e-3), optimizer(net->parameters(), 1e-3);
  fsdp::FullyShardedDataParallel model(net, fsdp::init_process_group(),
                                       {.auto_wrap_policy = fsdp::module_wrap_policy<benchmark::BlockImpl>()});
  const auto ids = torch::randint(0, options.vocabulary, {4, options.length + 1});
  const auto input = ids.slice(1, 0, options.length), target = ids.slice(1, 1).flatten();

  const auto step = [&](auto forward, torch::optim::Optimizer& optimizer) {
    auto loss = torch::nn::functional::cross_entropy(forward(input).flatten(0, 1), target);
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    return loss.template item<float>();
  };
  std::vector<double> plain_ms, wrapped_ms, ratios;
  for (int pair = -3; pair < pairs; ++pair) {  // three to warm up
    auto start = Clock::now();
    const float want = step([&](torch::Tensor x) { return plain->forward(x); }, plain_optimizer);
    const double one = ms_since(start);
    start = Clock::now();
    const float got = step([&](torch::Tensor x) { return model(x); }, optimizer);
    const double other = ms_since(start);
    TORCH_CHECK(got == want, "step ", pair, ": the wrapped loss ", got, " is not the plain loss ", want,
                "; times of different work say nothing");
    if (pair < 0) continue;
    plain_ms.push_back(one);
    wrapped_ms.push_back(other);
    ratios.push_back(other / one);
  }

  auto many = std::make_shared<ManyTensors>(tensors);
  const auto start = Clock::now();
  fsdp::FullyShardedDataParallel wrapped_many(many, fsdp::init_process_group());
  const double wrap_ms = ms_since(start);

  int64_t elements = model.plan().numel();
  std::printf("GPT, %lld parameters, 4 x %lld tokens, AdamW, %d threads, %d alternating pairs\n", static_cast<long long>(elements),
              static_cast<long long>(options.length), threads, pairs);
  std::printf("plain    %7.2f ms   (quartiles %.2f to %.2f)\n", benchmark::quantile(plain_ms, 0.5), benchmark::quantile(plain_ms, 0.25),
              benchmark::quantile(plain_ms, 0.75));
  std::printf("wrapped  %7.2f ms   (quartiles %.2f to %.2f)\n", benchmark::quantile(wrapped_ms, 0.5), benchmark::quantile(wrapped_ms, 0.25),
              benchmark::quantile(wrapped_ms, 0.75));
  std::printf("ratio    %7.3f      (quartiles %.3f to %.3f), pair by pair\n", benchmark::quantile(ratios, 0.5),
              benchmark::quantile(ratios, 0.25), benchmark::quantile(ratios, 0.75));
  std::printf("wrapping %d parameter tensors: %.0f ms\n", tensors, wrap_ms);
  if (!json_file.empty()) {
    const nlohmann::json figures = {{"parameters", elements},
                                    {"pairs", pairs},
                                    {"threads", threads},
                                    {"plain_ms", benchmark::quantile(plain_ms, 0.5)},
                                    {"wrapped_ms", benchmark::quantile(wrapped_ms, 0.5)},
                                    {"ratio", benchmark::quantile(ratios, 0.5)},
                                    {"ratio_quartiles", {benchmark::quantile(ratios, 0.25), benchmark::quantile(ratios, 0.75)}},
                                    {"wrap_10000_tensors_ms", wrap_ms}};
    std::ofstream(json_file) << figures.dump(2) << "\n";
  }
}
