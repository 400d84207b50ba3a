// Learning rates as DeepSpeed's schedulers give them. The numbers were computed by hand from its formulas.
#include "tools/warmup_schedule.h"

#include <catch2/catch_all.hpp>
#include <cmath>
#include <numbers>

using Catch::Matchers::WithinRel;
using namespace fsdp::tools;

TEST_CASE("without a scheduler the rate stays", "[tools][quick]") { CHECK(WarmupSchedule{}(7, 0.3) == 0.3); }

TEST_CASE("WarmupLR climbs from the least to the largest rate and stays", "[tools][quick]") {
  WarmupSchedule schedule{
      .type = ScheduleType::WARMUP, .warmup_type = WarmupType::LINEAR, .warmup_steps = 4, .warmup_min_lr = 0.1, .warmup_max_lr = 0.5};
  CHECK(schedule(0, 9) == 0.1);
  CHECK(schedule(1, 9) == 0.1);
  CHECK_THAT(schedule(3, 9), WithinRel(0.3, 1e-12));
  CHECK(schedule(5, 9) == 0.5);
  CHECK(schedule(500, 9) == 0.5);
  schedule.warmup_type = WarmupType::LOG;
  CHECK_THAT(schedule(2, 9), WithinRel(0.1 + 0.4 * std::log(2) / std::log(4), 1e-12));
}

TEST_CASE("WarmupDecayLR falls to the least rate at the last step", "[tools][quick]") {
  const WarmupSchedule schedule{
      .type = ScheduleType::WARMUP_DECAY, .warmup_type = WarmupType::LINEAR, .warmup_steps = 2, .total_steps = 10, .warmup_max_lr = 1};
  CHECK(schedule(3, 9) == 1);
  CHECK_THAT(schedule(7, 9), WithinRel(0.5, 1e-12));
  CHECK(schedule(11, 9) == 0);
  CHECK(schedule(99, 9) == 0);
}

TEST_CASE("WarmupCosineLR is a share of the optimizer's rate", "[tools][quick]") {
  const WarmupSchedule schedule{
      .type = ScheduleType::WARMUP_COSINE, .warmup_type = WarmupType::LINEAR, .warmup_steps = 2, .total_steps = 10, .cos_min_ratio = 0.1};
  CHECK(schedule(0, 2) == 0);
  CHECK_THAT(schedule(2, 2), WithinRel(1.0, 1e-12));
  CHECK_THAT(schedule(3, 2), WithinRel(2 * (0.1 + 0.9 * (1 + std::cos(std::numbers::pi / 8)) / 2), 1e-12));
  CHECK_THAT(schedule(10, 2), WithinRel(0.2, 1e-12));
}
