// What fsdp-train is asked to do: one JSON file, keys with the meaning that DeepSpeed gives them where DeepSpeed has them. Any key that is
// not listed here is refused by its full name; null counts as absent.
//
//     model.path                       a Hugging Face folder: config.json and safetensors; or
//     model.config                     an object as in such a config.json: a model from scratch
//     lora.r, lora_alpha, lora_dropout, target_modules   as PEFT's; everything else is frozen, and kept in the compute dtype
//     lora.adapter                     instead: a folder in PEFT's layout to start from
//     data.train, data.validation      files of tokens (token_file.h) or of batches (training_rows.h); validation is optional
//     data.seq_len                     targets in a row of a file of tokens
//     train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks: any two, or the first two alone
//     optimizer.type                   AdamW (default), Adam (decoupled decay unless adam_w_mode is false), SGD; optimizer.params: lr,
//                                      betas, eps, weight_decay, adam_w_mode, momentum, no_decay (patterns of names without decay)
//     scheduler.type, scheduler.params see warmup_schedule.h; none: the rate stays as it is
//     bf16.enabled, fp16.enabled       compute dtype; neither: fp32. fp16.loss_scale (0: found while training), initial_scale_power,
//                                      loss_scale_window, hysteresis, min_loss_scale
//     gradient_clipping                largest norm; absent or 0: none
//     zero_optimization.stage          2 or 3 (default); stage3_max_live_parameters: times the compute dtype, the budget in bytes
//     max_steps, seed, eval_every      optimizer steps; validation before the first, every so often, and after the last
//     output_dir                       what was trained is saved there at the end: adapter/ in PEFT's layout, or model/ in Hugging Face's
//     save_every                       steps; checkpoints in output_dir/checkpoints, the last two kept, also one at the end
//     resume                           "auto": from the newest valid checkpoint there, if any; or the path of one. Without it a folder that
//                                      holds checkpoints is refused. Only max_steps, paths, the split of the global batch, and when to
//                                      evaluate and save may differ from the run that saved
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

struct LoraConfig {
  int64_t r = 8;
  double alpha = 16, dropout = 0;
  std::vector<std::string> target_modules{"all-linear"};
  std::string adapter;  // where not empty, it brings the rest
};

struct LossScaleConfig {
  double init_scale = 65536, min_scale = 1;
  int64_t growth_interval = 1000;
  int64_t hysteresis = 2;  // steps that overflow until the scale shrinks, counted anew whenever it grows
  bool dynamic = true;
};

enum class ComputeDtype { FP32, BF16, FP16 };

struct TrainConfig {
  std::string model_path;    // or
  std::string model_config;  // JSON text
  std::optional<LoraConfig> lora;
  std::string train, validation;
  int64_t seq_len = 0;
  BatchSizes batch;
  OptimizerConfig optimizer;
  WarmupSchedule schedule;
  ComputeDtype dtype = ComputeDtype::FP32;
  LossScaleConfig loss_scale;  // of fp16
  double gradient_clipping = 0;
  int64_t zero_stage = 3;
  bool zero_stage_given = false;
  std::optional<int64_t> max_live_parameters;
  int64_t max_steps = 0, seed = 0, eval_every = 0, save_every = 0;
  std::string output_dir, resume, metrics_file;
  std::string fingerprint;  // JSON text: all that must be the same when a run is resumed
};

// `overrides` are "key.sub=value" each, the value JSON or, where it is none, a string. Throws c10::Error that names the key, what was
// expected and what is there.
TrainConfig read_train_config(const std::string& json_text, const std::vector<std::string>& overrides, int world_size);

}  // namespace fsdp::tools
