// How long the collectives take by size, through the seam that the library itself uses:
//
//     scripts/launch -n 2 build/bin/collectives --most 1000000
//
// Sizes are those of the whole buffer (of what all ranks have together), as in stats(). What each result holds is checked.
#include <fsdp/process_group.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "comm/collectives.h"
#include "statistics.h"

namespace {

using Clock = std::chrono::steady_clock;

// As the library does it: all-gathers and reduce-scatters work in place, in this rank's block of the buffer.
struct Operation {
  std::string name;
  std::function<void(float rank, at::Tensor whole, at::Tensor own)> fill;
  std::function<fsdp::comm::Pending(fsdp::comm::Collectives& group, at::Tensor whole, at::Tensor own)> start;
  std::function<bool(int world_size, at::Tensor whole, at::Tensor own)> right;
};

float sum_of_ranks(int world_size) { return static_cast<float>(world_size * (world_size + 1)) / 2; }

std::vector<Operation> operations() {
  const auto fill_own = [](float rank, at::Tensor whole, at::Tensor own) {
    whole.fill_(-1);
    own.fill_(rank);
  };
  const auto fill_whole = [](float rank, at::Tensor whole, at::Tensor) { whole.fill_(rank); };
  return {{"all_gather", fill_own, [](auto& group, at::Tensor whole, at::Tensor own) { return group.all_gather(whole, own, "benchmark"); },
           [](int world_size, at::Tensor whole, at::Tensor) {
             const auto ranks = torch::arange(1, world_size + 1, torch::kFloat).unsqueeze(1);
             return whole.view({world_size, -1}).eq(ranks).all().item<bool>();
           }},
          {"reduce_scatter", fill_whole,
           [](auto& group, at::Tensor whole, at::Tensor own) { return group.reduce_scatter(own, whole, "benchmark"); },
           [](int world_size, at::Tensor, at::Tensor own) { return own.eq(sum_of_ranks(world_size)).all().item<bool>(); }},
          {"all_reduce", fill_whole, [](auto& group, at::Tensor whole, at::Tensor) { return group.all_reduce(whole, "benchmark"); },
           [](int world_size, at::Tensor whole, at::Tensor) { return whole.eq(sum_of_ranks(world_size)).all().item<bool>(); }},
          {"broadcast", fill_whole, [](auto& group, at::Tensor whole, at::Tensor) { return group.broadcast(whole, 0, "benchmark"); },
           [](int, at::Tensor whole, at::Tensor) { return whole.eq(1).all().item<bool>(); }}};
}

// Milliseconds from the start to the result on the rank where it took longest (a broadcast's root is done before the others are), one a
// round; the operations take turns.
std::vector<std::vector<double>> time_all(fsdp::ProcessGroup& group, const std::vector<Operation>& all, int64_t elements, int rounds) {
  constexpr int kWarmUp = 2;
  const auto whole = torch::empty({elements}),
             own = whole.narrow(0, group.rank() * (elements / group.world_size()), elements / group.world_size());
  std::vector<std::vector<double>> times(all.size());
  for (int round = -kWarmUp; round < rounds; ++round) {
    for (size_t i = 0; i < all.size(); ++i) {
      all[i].fill(static_cast<float>(group.rank() + 1), whole, own);
      group.barrier();
      const auto start = Clock::now();
      all[i].start(*group.collectives(), whole, own).wait();
      const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
      TORCH_CHECK(all[i].right(group.world_size(), whole, own), all[i].name, " of ", elements, " elements gave wrong values on rank ",
                  group.rank());
      if (round >= 0) times[i].push_back(ms);
    }
  }
  const auto every = group.collectives()->exchange("times", nlohmann::json(times).dump());
  for (const auto& text : every) {
    const auto of_rank = nlohmann::json::parse(text).get<std::vector<std::vector<double>>>();
    for (size_t i = 0; i < times.size(); ++i)
      for (size_t round = 0; round < times[i].size(); ++round) times[i][round] = std::max(times[i][round], of_rank[i][round]);
  }
  return times;
}

}  // namespace

int main(int argc, char** argv) try {
  int64_t least = 4096, most = int64_t{64} << 20;
  int rounds = 40;
  CLI::App app("How long the collectives take by size.");
  app.add_option("--least", least, "bytes of the smallest buffer")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--most", most, "bytes of the largest; each is four times the one before")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", rounds, "times that each is measured; a quarter of it from 16 MiB on")
      ->capture_default_str()
      ->check(CLI::Range(4, 100'000));
  CLI11_PARSE(app, argc, argv);

  fsdp::ProcessGroup group = fsdp::init_process_group();
  const torch::NoGradGuard no_grad;
  const auto all = operations();
  nlohmann::json rows = nlohmann::json::array();
  if (group.rank() == 0) std::printf("%-15s %12s %10s %22s %8s\n", "operation", "bytes", "ms", "quartiles", "GB/s");
  for (int64_t bytes = least; bytes <= most; bytes *= 4) {
    const int64_t elements = std::max<int64_t>(bytes / 4 / group.world_size(), 1) * group.world_size();
    const auto times = time_all(group, all, elements, bytes < (16 << 20) ? rounds : rounds / 4);
    for (size_t i = 0; i < all.size(); ++i) {
      const double ms = benchmark::quantile(times[i], 0.5), low = benchmark::quantile(times[i], 0.25),
                   high = benchmark::quantile(times[i], 0.75);
      const double gb_per_s = static_cast<double>(4 * elements) / ms / 1e6;
      if (group.rank() == 0)
        std::printf("%-15s %12ld %10.3f %10.3f to %8.3f %8.2f\n", all[i].name.c_str(), 4 * elements, ms, low, high, gb_per_s);
      rows.push_back({{"operation", all[i].name},
                      {"bytes", 4 * elements},
                      {"world_size", group.world_size()},
                      {"ms", ms},
                      {"quartiles_ms", {low, high}},
                      {"gb_per_s", gb_per_s}});
    }
  }
  if (group.rank() == 0) std::printf("%s\n", rows.dump().c_str());
  group.barrier();
  group.close();
  return 0;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "collectives: %s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "collectives: %s\n", error.what());
  return 1;
}
