#include <fsdp/lr_schedule.h>

#include <c10/util/Exception.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fsdp {
namespace {

double warmup(int64_t step, int64_t warmup_steps) {
  TORCH_CHECK(step >= 0 && warmup_steps >= 0, "learning-rate schedule: expected step and warmup_steps of at least 0, got ", step, " and ",
              warmup_steps);
  return std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(warmup_steps + 1));
}

// How much of the way from the end of warm-up to total_steps is done: 0 to 1.
double progress(int64_t step, int64_t warmup_steps, int64_t total_steps) {
  TORCH_CHECK(total_steps > warmup_steps, "learning-rate schedule: total_steps must be above warmup_steps, got ", total_steps, " and ",
              warmup_steps);
  return std::clamp(static_cast<double>(step - warmup_steps) / static_cast<double>(total_steps - warmup_steps), 0.0, 1.0);
}

}  // namespace

double ConstantSchedule::operator()(int64_t step) const { return warmup(step, warmup_steps); }

double LinearSchedule::operator()(int64_t step) const {
  return warmup(step, warmup_steps) * (1 - (1 - final_factor) * progress(step, warmup_steps, total_steps));
}

double CosineSchedule::operator()(int64_t step) const {
  const double height = (1 + std::cos(std::numbers::pi * progress(step, warmup_steps, total_steps))) / 2;
  return warmup(step, warmup_steps) * (final_factor + (1 - final_factor) * height);
}

}  // namespace fsdp
