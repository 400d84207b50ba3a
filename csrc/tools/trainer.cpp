#include "tools/trainer.h"

#include <fmt/format.h>
#include <fsdp/checkpoint.h>
#include <fsdp/distributed_sampler.h>
#include <fsdp/exchange.h>
#include <fsdp/weights.h>
#include <torch/nn/functional/loss.h>
#include <torch/utils.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <numeric>

#include "models/model_config.h"
#include "tools/metrics_file.h"
#include "tools/pretrained.h"
#include "tools/train_optimizer.h"
#include "tools/training_rows.h"

namespace fsdp::tools {
namespace {

volatile std::sig_atomic_t stop_requested = 0;

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  int64_t size = 0, resident = 0;
  file >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Of a global batch: this rank's micro-batches, and the targets that all of it has.
struct GlobalBatch {
  std::vector<Batch> own;
  double targets = 0;
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
      architecture_ =
          config_.model_path.empty() ? models::parse_config(config_.model_config, "model.config") : models::load_config(config_.model_path);
      TORCH_CHECK(architecture_.architecture != models::Architecture::GPT2 || config_.seq_len <= architecture_.max_positions,
                  "'data.seq_len' is ", config_.seq_len, ", the model has ", architecture_.max_positions, " positions (n_positions)");
      train_data_ = open(config_.train, "data.train", 1);
      TORCH_CHECK(train_data_->rows_in_batch() == 0 || train_data_->rows_in_batch() == config_.batch.global, "'data.train' has batches of ",
                  train_data_->rows_in_batch(), " rows, 'train_batch_size' is ", config_.batch.global);
      if (!config_.validation.empty()) validation_data_ = open(config_.validation, "data.validation", config_.seq_len);
      if (prints()) open_output();
    });
    if (train_data_->rows_in_batch() == 0)
      sampler_ = std::make_unique<DistributedSampler>(static_cast<size_t>(train_data_->size()), group_,
                                                      DistributedSamplerOptions{.seed = static_cast<uint64_t>(config_.seed)});
    torch::manual_seed(static_cast<uint64_t>(config_.seed));
    model_ = std::make_unique<ShardedLM>(make_model(architecture_, lora_options(), group_), group_, sharding_options());
    load();
    optimizer_ = std::make_unique<TrainOptimizer>(*model_, config_);
    torch::manual_seed(static_cast<uint64_t>(config_.seed) + 1 + static_cast<uint64_t>(group_.rank()));  // dropout differs between ranks
    model_->set_gradient_divisor(1);  // the loss is a sum over this rank's targets, divided by those of all ranks
    print_plan();
    resume();
  }

  void run() {
    const auto start = Clock::now();
    int64_t step = first_step_;
    if (config_.eval_every > 0 && step == 0) validate(0);
    bool stops = false;
    while (step < config_.max_steps && !stops) {
      stops = train_step(++step);
      const bool last = step == config_.max_steps || stops;
      if (config_.save_every > 0 && (last || step % config_.save_every == 0)) save_at(step);
      if (validation_data_ && (last || (config_.eval_every > 0 && step % config_.eval_every == 0))) validate(step);
    }
    save();
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
  std::unique_ptr<TrainingRows> open(const std::string& path, const char* key, int64_t stride) const {
    auto rows = path.ends_with(".safetensors") ? open_batches(path, key) : open_windows(path, key, config_.seq_len, stride);
    const int64_t ranks = group_.world_size(), rank = group_.rank();
    rows->check_ids(rows->size() * rank / ranks, rows->size() * (rank + 1) / ranks, architecture_.vocab_size);
    return rows;
  }

  std::optional<lora::LoraOptions> lora_options() const {
    if (!config_.lora) return std::nullopt;
    std::optional<lora::LoraOptions> options;
    run_on_all(group_, "reading the adapter", [&] {
      options = config_.lora->adapter.empty() ? lora::LoraOptions{.r = config_.lora->r,
                                                                  .alpha = config_.lora->alpha,
                                                                  .dropout = config_.lora->dropout,
                                                                  .target_modules = config_.lora->target_modules}
                                              : lora::read_options(config_.lora->adapter);
    });
    return options;
  }

  void load() {
    if (!config_.model_path.empty()) load_pretrained(*model_, architecture_, config_.model_path);
    if (config_.lora && !config_.lora->adapter.empty()) lora::load_adapter(*model_, config_.lora->adapter);
  }

  std::string checkpoints() const { return config_.output_dir + "/checkpoints"; }

  void open_output() {
    metrics_ = std::make_unique<MetricsFile>(config_.metrics_file, /*goes_on=*/!config_.resume.empty());
    if (config_.output_dir.empty()) return;
    TORCH_CHECK(!config_.resume.empty() || !std::filesystem::exists(checkpoints()), "'", checkpoints(),
                "' is there already; go on with it (\"resume\": \"auto\"), move it away, or name another output_dir");
    std::filesystem::create_directories(config_.output_dir);
  }

  void save_at(int64_t step) {
    const nlohmann::json extra{{"fingerprint", config_.fingerprint}, {"sampler", sampler_state()}, {"loss_scale", optimizer_->state()}};
    const auto path = save_checkpoint(checkpoints(), step, *model_, optimizer_->checkpointed(), extra.dump(), {.keep_last = 2});
    print("saved " + path);
  }

  nlohmann::json sampler_state() const {
    if (!sampler_) return nullptr;
    const auto state = sampler_->state();
    return {{"position", state.position}, {"epoch", state.epoch}, {"size", state.size}, {"seed", state.seed}};
  }

  void resume() {
    if (config_.resume.empty()) return;
    const bool newest = config_.resume == "auto";
    const auto loaded =
        load_checkpoint(newest ? checkpoints() : config_.resume, *model_, optimizer_->checkpointed(), {.fall_back = newest});
    TORCH_CHECK(loaded || newest, "'resume': there is no checkpoint at '", config_.resume, "'");
    if (!loaded) return;
    run_on_all(group_, "resuming", [&] {
      const auto extra = nlohmann::json::parse(loaded->extra, nullptr, /*allow_exceptions=*/false);
      TORCH_CHECK(extra.is_object() && extra.contains("fingerprint"), "'", loaded->path, "' was not saved by fsdp-train");
      check_fingerprint(nlohmann::json::parse(extra["fingerprint"].get<std::string>()), loaded->path);
      if (sampler_) {
        const auto& state = extra.at("sampler");
        TORCH_CHECK(state.at("size") == static_cast<int64_t>(sampler_->size()), "'data.train' has ", sampler_->size(),
                    " rows to draw from, the run in '", loaded->path, "' had ", state.at("size").dump());
        sampler_->set_state({state.at("position"), state.at("epoch"), state.at("size"), state.at("seed"), true});
      }
      optimizer_->load_state(extra.at("loss_scale"));
    });
    first_step_ = loaded->step;
    if (prints()) metrics_->cut_after(first_step_);
    print(fmt::format("resumed from {}, saved on {} ranks", loaded->path, loaded->world_size));
  }

  void check_fingerprint(const nlohmann::json& saved, const std::string& path) const {
    const auto own = nlohmann::json::parse(config_.fingerprint);
    std::string differences;
    for (const auto& change : nlohmann::json::diff(saved, own)) {
      std::string key = change["path"].get<std::string>().substr(1);
      std::replace(key.begin(), key.end(), '/', '.');
      differences += (differences.empty() ? "'" : ", '") + key + "'";
    }
    TORCH_CHECK(differences.empty(), "the run in '", path, "' had other settings: ", differences,
                ". Give the same, or begin a new run in another output_dir");
  }

  void save() {
    if (config_.output_dir.empty()) return;
    const std::string folder = config_.output_dir + (config_.lora ? "/adapter" : "/model");
    if (config_.lora) {
      lora::save_adapter(*model_, folder);
    } else {
      save_weights(*model_, folder);
      run_on_all(group_, "saving config.json", [&] {
        if (!prints()) return;
        std::ofstream file(folder + "/config.json");
        file << (config_.model_path.empty() ? config_.model_config : models::read_config_text(config_.model_path)) << "\n";
        TORCH_CHECK(file.flush(), "'", folder, "/config.json' cannot be written");
      });
    }
    print(fmt::format("saved in {}", folder));
  }

  FsdpOptions sharding_options() const {
    FsdpOptions options;
    if (config_.zero_stage == 2) options.sharding_strategy = ShardingStrategy::SHARD_GRAD_OP;
    options.auto_wrap_policy = models::block_policy();
    if (config_.dtype == ComputeDtype::BF16) options.mixed_precision.param_dtype = at::kBFloat16;
    if (config_.dtype == ComputeDtype::FP16) options.mixed_precision.param_dtype = at::kHalf;
    if (config_.lora) options.unsharded = is_adapter;
    if (config_.max_live_parameters)
      options.max_unsharded_bytes = *config_.max_live_parameters * (config_.dtype == ComputeDtype::FP32 ? 4 : 2);
    return options;
  }

  void print_plan() const {
    print(model_->plan().to_string());
    if (config_.lora) print(lora::trainable_report(*model_));
    print(fmt::format("ZeRO stage {}{}, {}, {} ranks ({}), {} bytes of parameters on rank 0, batches of {} = {} x {} x {} ranks",
                      config_.zero_stage, config_.zero_stage_given ? "" : " (no zero_optimization.stage given)", dtype_name(),
                      group_.world_size(), group_.backend(), model_->stats().shard_bytes, config_.batch.global, config_.batch.micro,
                      config_.batch.accumulation, group_.world_size()));
  }

  const char* dtype_name() const {
    switch (config_.dtype) {
      case ComputeDtype::BF16:
        return config_.lora ? "bf16 with fp32 adapters" : "bf16 with fp32 masters";
      case ComputeDtype::FP16:
        return config_.lora ? "fp16 with fp32 adapters" : "fp16 with fp32 masters";
      case ComputeDtype::FP32:
        return "fp32";
    }
    return "";
  }

  // Of the file's own batches the rank's block of rows, in order; of drawn windows what the sampler deals.
  GlobalBatch next_batch(int64_t step) {
    const auto& [global, micro, accumulation] = config_.batch;
    GlobalBatch batch;
    if (train_data_->rows_in_batch() > 0) {
      const int64_t first = (step - 1) * global % train_data_->size(), own = first + group_.rank() * micro * accumulation;
      for (int64_t i = 0; i < accumulation; ++i) batch.own.push_back(train_data_->read(consecutive(own + i * micro, micro)));
      batch.targets = static_cast<double>(train_data_->read(consecutive(first, global)).targets.ne(kIgnored).sum().item<int64_t>());
      TORCH_CHECK(batch.targets > 0, "'data.train': the batch of step ", step, " has no target at all");
      return batch;
    }
    for (int64_t i = 0; i < accumulation; ++i) {
      auto indices = sampler_->next(static_cast<size_t>(micro));
      if (!indices) {
        sampler_->reset();
        indices = sampler_->next(static_cast<size_t>(micro));
      }
      batch.own.push_back(train_data_->read({indices->begin(), indices->end()}));
    }
    batch.targets = static_cast<double>(global * config_.seq_len);
    return batch;
  }

  static std::vector<int64_t> consecutive(int64_t first, int64_t count) {
    std::vector<int64_t> rows(static_cast<size_t>(count));
    std::iota(rows.begin(), rows.end(), first);
    return rows;
  }

  at::Tensor loss_sum(const Batch& batch) {
    const auto logits = (*model_)(batch.ids).flatten(0, 1).to(at::kFloat);
    return torch::nn::functional::cross_entropy(
        logits, batch.targets.flatten(), torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum).ignore_index(kIgnored));
  }

  // True: somebody wants to stop.
  bool train_step(int64_t step) {
    const auto start = Clock::now();
    const auto batch = next_batch(step);
    model_->train();
    double own_loss = 0;
    for (const auto& micro : batch.own) {
      const auto loss = loss_sum(micro);
      optimizer_->scale(loss / batch.targets).backward();
      own_loss += loss.item<double>();
    }
    optimizer_->unscale();
    const double most = config_.gradient_clipping > 0 ? config_.gradient_clipping : std::numeric_limits<double>::infinity();
    const double norm = model_->clip_grad_norm_(most).norm;
    const double lr = config_.schedule(step - 1, config_.optimizer.lr);
    optimizer_->step(lr);
    model_->zero_grad();

    const auto sums = sum_over_ranks(group_, {own_loss, stop_requested ? 1.0 : 0.0});
    const double loss = sums[0] / batch.targets, seconds = seconds_since(start);
    if (prints()) {
      metrics_->write({{"step", step},
                       {"loss", loss},
                       {"grad_norm", norm},
                       {"lr", lr},
                       {"tokens_per_s", batch.targets / seconds},
                       {"step_ms", seconds * 1e3},
                       {"loss_scale", optimizer_->loss_scale()},
                       {"peak_unsharded_bytes", model_->stats().peak_unsharded_bytes},
                       {"rss_bytes", resident_bytes()}});
      print(fmt::format("step {:5d} of {}   loss {:.4f}   norm {:.3f}   lr {:.3g}   {:.0f} tokens/s   {:.0f} MB", step, config_.max_steps,
                        loss, norm, lr, batch.targets / seconds, static_cast<double>(resident_bytes()) / 1e6));
    }
    return sums[1] > 0;
  }

  // Rows that follow each other from the beginning of the file, dealt in turn; a rank that has none left goes through the model with
  // targets that do not count, since the ranks gather parameters together.
  void validate(int64_t step) {
    if (!validation_data_) return;
    torch::NoGradGuard no_grad;
    model_->eval();
    const int64_t rows = validation_data_->size(), ranks = group_.world_size(), micro = config_.batch.micro;
    LossSum own;
    for (int64_t round = 0; round < rows; round += micro * ranks) {
      std::vector<int64_t> mine;
      int64_t real = 0;
      for (int64_t i = 0; i < micro; ++i) {
        const int64_t row = round + group_.rank() * micro + i;
        mine.push_back(row < rows ? row : 0);
        real += row < rows;
      }
      const auto batch = validation_data_->read(mine);
      batch.targets.narrow(0, real, micro - real).fill_(kIgnored);
      own.loss += loss_sum(batch).item<double>();
      own.targets += static_cast<double>(batch.targets.ne(kIgnored).sum().item<int64_t>());
    }
    const auto sums = sum_over_ranks(group_, {own.loss, own.targets});
    const double loss = LossSum{sums[0], sums[1]}.mean();
    if (prints()) metrics_->write({{"step", step}, {"validation_loss", loss}});
    print(fmt::format("after step {}: validation loss {:.4f} nats per token, {:.0f} tokens", step, loss, sums[1]));
  }

  const TrainConfig& config_;
  ProcessGroup& group_;
  models::ModelConfig architecture_;
  std::unique_ptr<TrainingRows> train_data_, validation_data_;
  std::unique_ptr<MetricsFile> metrics_;         // rank 0
  int64_t first_step_ = 0;                       // made before this run began
  std::unique_ptr<DistributedSampler> sampler_;  // none where the file has batches
  std::unique_ptr<ShardedLM> model_;
  std::unique_ptr<TrainOptimizer> optimizer_;
};

void request_stop() noexcept { stop_requested = 1; }

Trainer::Trainer(const TrainConfig& config, ProcessGroup& group) : impl_(std::make_unique<Impl>(config, group)) {}
Trainer::~Trainer() = default;
void Trainer::run() { impl_->run(); }

}  // namespace fsdp::tools
