// What fsdp-train is asked to do: one JSON file, keys with the meaning that DeepSpeed gives them where DeepSpeed has them. Any key that is
// not listed here is refused by its full name; null counts as absent.
//
//     model.config                     an object as in a Hugging Face config.json: a model from scratch
//     data.train, data.validation      files of tokens (token_file.h); validation is optional
//     data.seq_len                     targets in a row
//     train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks: any two, or the first two alone
//     optimizer.type                   AdamW (default), Adam (decoupled decay unless adam_w_mode is false), SGD; optimizer.params: lr,
//                                      betas, eps, weight_decay, adam_w_mode, momentum, no_decay (patterns of names without decay)
//     scheduler.type, scheduler.params see warmup_schedule.h; none: the rate stays as it is
//     bf16.enabled                     compute dtype; otherwise fp32
//     gradient_clipping                largest norm; absent or 0: none
//     zero_optimization.stage          2 or 3 (default); stage3_max_live_parameters: times the compute dtype, the budget in bytes
//     max_steps, seed, eval_every      optimizer steps; validation before the first, every so often, and after the last
//     metrics_file                     JSON lines
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tools/warmup_schedule.h"

namespace fsdp::tools {

enum class OptimizerType { ADAMW, ADAM, SGD };

struct OptimizerConfig {
  OptimizerType type = OptimizerType::ADAMW;
  double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0, momentum = 0;
  std::vector<std::string> no_decay;
};

struct BatchSizes {
  int64_t global = 0, micro = 0, accumulation = 0;  // global = micro * accumulation * world size
};

struct TrainConfig {
  std::string model_config;  // JSON text
  std::string train, validation;
  int64_t seq_len = 0;
  BatchSizes batch;
  OptimizerConfig optimizer;
  WarmupSchedule schedule;
  bool bf16 = false;
  double gradient_clipping = 0;
  int64_t zero_stage = 3;
  bool zero_stage_given = false;
  std::optional<int64_t> max_live_parameters;
  int64_t max_steps = 0, seed = 0, eval_every = 0;
  std::string metrics_file;
};

// `overrides` are "key.sub=value" each, the value JSON or, where it is none, a string. Throws c10::Error that names the key, what was
// expected and what is there.
TrainConfig read_train_config(const std::string& json_text, const std::vector<std::string>& overrides, int world_size);

}  // namespace fsdp::tools
