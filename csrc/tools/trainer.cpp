#include "tools/trainer.h"

#include <fmt/format.h>
#include <fsdp/distributed_sampler.h>
#include <fsdp/exchange.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>

#include "models/causal_lm.h"
#include "models/model_config.h"
#include "tools/metrics_file.h"
#include "tools/token_file.h"
#include "tools/train_optimizer.h"

namespace fsdp::tools {
namespace {

constexpr int64_t kIgnored = -100;  // a target that is no part of the loss
volatile std::sig_atomic_t stop_requested = 0;

using Clock = std::chrono::steady_clock;
using Model = FullyShardedDataParallel<models::CausalLMImpl>;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

struct Batch {
  at::Tensor ids, targets;  // (rows, seq_len) int64; memory of their own
};

// What was lost over how many targets, summed up in double.
struct LossSum {
  double loss = 0;
  double targets = 0;
  double mean() const { return loss / targets; }
};

}  // namespace

class Trainer::Impl {
 public:
  Impl(const TrainConfig& config, ProcessGroup& group) : config_(config), group_(group) {
    run_on_all(group_, "setting up training", [&] {
      architecture_ = models::parse_config(config_.model_config, "model.config");
      TORCH_CHECK(architecture_.architecture != models::Architecture::GPT2 || config_.seq_len <= architecture_.max_positions,
                  "'data.seq_len' is ", config_.seq_len, ", the model has ", architecture_.max_positions, " positions (n_positions)");
      train_data_ = open(config_.train, "data.train");
      if (!config_.validation.empty()) validation_data_ = open(config_.validation, "data.validation");
      if (prints()) metrics_ = std::make_unique<MetricsFile>(config_.metrics_file);
    });
    sampler_ = std::make_unique<DistributedSampler>(static_cast<size_t>(train_data_->size() - config_.seq_len), group_,
                                                    DistributedSamplerOptions{.seed = static_cast<uint64_t>(config_.seed)});
    torch::manual_seed(static_cast<uint64_t>(config_.seed));
    model_ = std::make_unique<Model>(models::make_model(architecture_), group_, sharding_options());
    optimizer_ = std::make_unique<TrainOptimizer>(*model_, config_.optimizer);
    torch::manual_seed(static_cast<uint64_t>(config_.seed) + 1 + static_cast<uint64_t>(group_.rank()));  // dropout differs between ranks
    model_->set_gradient_divisor(1);  // the loss is a sum over this rank's targets, divided by those of all ranks
    print_plan();
  }

  void run() {
    const auto start = Clock::now();
    if (config_.eval_every > 0) validate(0);
    int64_t step = 0;
    bool stops = false;
    while (step < config_.max_steps && !stops) {
      stops = train_step(++step);
      const bool last = step == config_.max_steps || stops;
      if (validation_data_ && (last || (config_.eval_every > 0 && step % config_.eval_every == 0))) validate(step);
    }
    print(fmt::format("{} after {} of {} steps, {:.1f} s", stops ? "stopped on request" : "done", step, config_.max_steps,
                      seconds_since(start)));
  }

 private:
  bool prints() const { return group_.rank() == 0; }
  void print(const std::string& line) const {
    if (!prints()) return;
    std::printf("%s\n", line.c_str());
    std::fflush(stdout);
  }

  // Each rank looks through its share of the ids.
  std::unique_ptr<TokenFile> open(const std::string& path, const char* key) const {
    auto file = std::make_unique<TokenFile>(path);
    TORCH_CHECK(file->size() > config_.seq_len, "'", key, "': '", path, "' has ", file->size(),
                " tokens; a row of data.seq_len = ", config_.seq_len, " targets takes ", config_.seq_len + 1);
    const int64_t ranks = group_.world_size(), rank = group_.rank();
    const auto largest = file->largest(file->size() * rank / ranks, file->size() * (rank + 1) / ranks);
    TORCH_CHECK(largest < architecture_.vocab_size, "'", key, "': '", path, "' has the token id ", largest, ", the model's ids end at ",
                architecture_.vocab_size - 1, " (vocab_size)");
    return file;
  }

  FsdpOptions sharding_options() const {
    FsdpOptions options;
    if (config_.zero_stage == 2) options.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP;
    options.auto_wrap_policy = models::block_policy();
    if (config_.bf16) options.mixed_precision.param_dtype = at::kBFloat16;
    if (config_.max_live_parameters) options.max_unsharded_bytes = *config_.max_live_parameters * (config_.bf16 ? 2 : 4);
    return options;
  }

  void print_plan() const {
    print(model_->plan().to_string());
    print(fmt::format("ZeRO stage {}{}, {}, {} ranks ({}), {} bytes of parameters on rank 0, batches of {} = {} x {} x {} ranks",
                      config_.zero_stage, config_.zero_stage_given ? "" : " (no zero_optimization.stage given)",
                      config_.bf16 ? "bf16 with fp32 masters" : "fp32", group_.world_size(), group_.backend(), model_->stats().shard_bytes,
                      config_.batch.global, config_.batch.micro, config_.batch.accumulation, group_.world_size()));
  }

  Batch rows_at(const TokenFile& file, const std::vector<int64_t>& begins) const {
    auto windows = at::empty({static_cast<int64_t>(begins.size()), config_.seq_len + 1}, at::kLong);
    for (size_t row = 0; row < begins.size(); ++row) file.read(begins[row], windows[static_cast<int64_t>(row)]);
    return {windows.narrow(1, 0, config_.seq_len), windows.narrow(1, 1, config_.seq_len).clone()};
  }

  Batch next_batch() {
    auto indices = sampler_->next(static_cast<size_t>(config_.batch.micro));
    if (!indices) {
      sampler_->reset();
      indices = sampler_->next(static_cast<size_t>(config_.batch.micro));
    }
    return rows_at(*train_data_, {indices->begin(), indices->end()});
  }

  at::Tensor loss_sum(const Batch& batch) {
    const auto logits = (*model_)(batch.ids).flatten(0, 1).to(at::kFloat);
    return torch::nn::functional::cross_entropy(
        logits, batch.targets.flatten(), torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(kIgnored));
  }

  // True: somebody wants to stop.
  bool train_step(int64_t step) {
    const auto start = Clock::now();
    const auto targets = static_cast<double>(config_.batch.global * config_.seq_len);
    model_->train();
    double own_loss = 0;
    for (int64_t i = 0; i < config_.batch.accumulation; ++i) {
      const auto loss = loss_sum(next_batch());
      (loss / targets).backward();
      own_loss += loss.item<double>();
    }
    const double most = config_.gradient_clipping > 0 ? config_.gradient_clipping : std::numeric_limits<double>::infinity();
    const double norm = model_->clip_grad_norm_(most).norm;
    const double lr = config_.schedule(step - 1, config_.optimizer.lr);
    optimizer_->step(lr);
    model_->zero_grad();

    const auto sums = sum_over_ranks(group_, {own_loss, stop_requested ? 1.0 : 0.0});
    const double loss = sums[0] / targets, seconds = seconds_since(start);
    if (prints()) {
      metrics_->write({{"step", step},
                       {"loss", loss},
                       {"grad_norm", norm},
                       {"lr", lr},
                       {"tokens_per_s", targets / seconds},
                       {"step_ms", seconds * 1e3},
                       {"peak_unsharded_bytes", model_->stats().peak_unsharded_bytes},
                       {"rss_bytes", resident_bytes()}});
      print(fmt::format("step {:5d} of {}   loss {:.4f}   norm {:.3f}   lr {:.3g}   {:.0f} tokens/s   {:.0f} MB", step, config_.max_steps,
                        loss, norm, lr, targets / seconds, static_cast<double>(resident_bytes()) / 1e6));
    }
    return sums[1] > 0;
  }

  // Rows that follow each other from the beginning of the file, dealt in turn; a rank that has none left goes through the model with
  // targets that do not count, since the ranks gather parameters together.
  void validate(int64_t step) {
    if (!validation_data_) return;
    torch::NoGradGuard no_grad;
    model_->eval();
    const int64_t rows = (validation_data_->size() - 1) / config_.seq_len, ranks = group_.world_size(), micro = config_.batch.micro;
    LossSum own;
    for (int64_t round = 0; round < rows; round += micro * ranks) {
      std::vector<int64_t> begins;
      int64_t real = 0;
      for (int64_t i = 0; i < micro; ++i) {
        const int64_t row = round + group_.rank() * micro + i;
        begins.push_back(row < rows ? row * config_.seq_len : 0);
        real += row < rows;
      }
      auto batch = rows_at(*validation_data_, begins);
      batch.targets.narrow(0, real, micro - real).fill_(kIgnored);
      own.loss += loss_sum(batch).item<double>();
      own.targets += static_cast<double>(real * config_.seq_len);
    }
    const auto sums = sum_over_ranks(group_, {own.loss, own.targets});
    const double loss = LossSum{sums[0], sums[1]}.mean();
    if (prints()) metrics_->write({{"step", step}, {"validation_loss", loss}});
    print(fmt::format("after step {}: validation loss {:.4f} nats per token, {:.0f} tokens", step, loss, sums[1]));
  }

  const TrainConfig& config_;
  ProcessGroup& group_;
  models::ModelConfig architecture_;
  std::unique_ptr<TokenFile> train_data_, validation_data_;
  std::unique_ptr<MetricsFile> metrics_;  // rank 0
  std::unique_ptr<DistributedSampler> sampler_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<TrainOptimizer> optimizer_;
};

void request_stop() noexcept { stop_requested = 1; }

Trainer::Trainer(const TrainConfig& config, ProcessGroup& group) : impl_(std::make_unique<Impl>(config, group)) {}
Trainer::~Trainer() = default;
void Trainer::run() { impl_->run(); }

}  // namespace fsdp::tools
