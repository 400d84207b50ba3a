// The learning-rate schedules of a DeepSpeed configuration: WarmupLR, WarmupDecayLR and WarmupCosineLR.
// Formulas: deepspeed/runtime/lr_schedules.py, read, not copied. An iteration is an optimizer step that was made.
#pragma once

#include <cstdint>

namespace fsdp::tools {

enum class ScheduleType { CONSTANT, WARMUP, WARMUP_DECAY, WARMUP_COSINE };
enum class WarmupType { LOG, LINEAR };

struct WarmupSchedule {
  ScheduleType type = ScheduleType::CONSTANT;
  WarmupType warmup_type = WarmupType::LOG;
  int64_t warmup_steps = 1000;
  int64_t total_steps = 0;      // WARMUP_DECAY and WARMUP_COSINE
  double warmup_min_lr = 0;     // WARMUP and WARMUP_DECAY
  double warmup_max_lr = 1e-3;  // the same
  double warmup_min_ratio = 0;  // WARMUP_COSINE: of the optimizer's lr
  double cos_min_ratio = 1e-4;  // the same

  // For the step that follows `steps` steps; `lr` is the optimizer's own.
  double operator()(int64_t steps, double lr) const;
};

}  // namespace fsdp::tools
