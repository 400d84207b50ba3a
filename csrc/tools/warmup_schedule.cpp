#include "tools/warmup_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace fsdp::tools {

double WarmupSchedule::operator()(int64_t steps, double lr) const {
  if (type == ScheduleType::CONSTANT) return lr;
  // DeepSpeed sets the first rate before any iteration, the second at iteration 0.
  if (steps == 0) return type == ScheduleType::WARMUP_COSINE ? 0 : warmup_min_lr;
  const auto iteration = static_cast<double>(steps - 1);
  const auto warmup = static_cast<double>(std::max<int64_t>(2, warmup_steps));
  const auto left = std::max(1.0, static_cast<double>(total_steps) - warmup);
  const bool warming = iteration < warmup;
  const double gamma = warmup_type == WarmupType::LOG ? std::log(iteration + 1) / std::log(warmup) : iteration / warmup;
  if (type == ScheduleType::WARMUP_COSINE) {
    if (warming) return lr * (warmup_min_ratio + (1 - warmup_min_ratio) * gamma);
    const double cosine = (1 + std::cos(std::numbers::pi * (iteration - warmup + 1) / left)) / 2;
    return lr * std::max(0.0, cos_min_ratio + (1 - cos_min_ratio) * cosine);
  }
  double share = 1;
  if (warming)
    share = gamma;
  else if (type == ScheduleType::WARMUP_DECAY)
    share = std::max(0.0, (static_cast<double>(total_steps) - iteration) / left);
  return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * share;
}

}  // namespace fsdp::tools
