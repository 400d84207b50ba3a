/// Learning rates over time, as factors of each parameter group's own lr. Plain values: call one with the number of steps made so far.
///
///     const fsdp::CosineSchedule schedule{.warmup_steps = 100, .total_steps = 10'000, .final_factor = 0.1};
///     optimizer.set_lr_factor(schedule(step));        // of a torch::optim optimizer: options.lr(lr * schedule(step))
///
/// During warm-up the factor climbs evenly, (step + 1) / (warmup_steps + 1), and is 1 at step `warmup_steps`. From `total_steps` on it
/// stays at `final_factor`.
///
/// Thread safety: any thread.
#pragma once

#include <fsdp/export.h>

#include <cstdint>

namespace fsdp {

/// 1 after warm-up.
struct ConstantSchedule {
  int64_t warmup_steps = 0;
  FSDP_API double operator()(int64_t step) const;
};

/// Falls along a straight line after warm-up. REQUIRES: total_steps > warmup_steps, else c10::Error.
struct LinearSchedule {
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double final_factor = 0;
  FSDP_API double operator()(int64_t step) const;
};

/// Falls along half a cosine after warm-up. REQUIRES: total_steps > warmup_steps, else c10::Error.
struct CosineSchedule {
  int64_t warmup_steps = 0;
  int64_t total_steps = 1;
  double final_factor = 0;
  FSDP_API double operator()(int64_t step) const;
};

}  // namespace fsdp
