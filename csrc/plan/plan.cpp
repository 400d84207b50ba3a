#include <fsdp/plan.h>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "plan/planner.h"

namespace fsdp {
namespace {

int64_t bytes_of(c10::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

template <class PerGroup>
int64_t sum_over_groups(const Plan& plan, PerGroup per_group) {
  int64_t sum = 0;
  for (const auto& unit : plan.units)
    for (const auto& group : unit.groups) sum += per_group(group);
  return sum;
}

std::string human_bytes(int64_t bytes) {
  constexpr const char* kNames[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  int name = 0;
  for (; value >= 1024 && name < 4; ++name) value /= 1024;
  return name == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, kNames[name]);
}

}  // namespace

int64_t PlannedGroup::numel() const {
  int64_t sum = 0;
  for (const auto& parameter : parameters) sum += parameter.numel;
  return sum;
}

int64_t Plan::numel() const {
  return sum_over_groups(*this, [](const PlannedGroup& group) { return group.numel(); });
}

int64_t Plan::shard_bytes() const {
  return sum_over_groups(*this, [](const PlannedGroup& group) { return group.shard_numel * bytes_of(group.dtype); });
}

int64_t PlannedUnit::unsharded_bytes(int world_size) const {
  int64_t sum = 0;
  for (const auto& group : groups)
    if (!group.replicated) sum += group.shard_numel * world_size * bytes_of(group.compute_dtype);
  return sum;
}

int64_t Plan::unsharded_bytes() const {
  int64_t sum = 0;
  for (const auto& unit : units) sum += unit.unsharded_bytes(world_size);
  return sum;
}

std::string Plan::to_string() const {
  size_t width = 6;
  for (const auto& unit : units) width = std::max(width, unit.name.size());
  std::string text =
      fmt::format("{:<{}}  {:>10}  {:>14}  {:<18}  {:>12}  {:>6}\n", "unit", width, "parameters", "elements", "dtype", "per rank", "share");
  const auto total = std::max<int64_t>(1, numel());
  for (const auto& unit : units)
    for (const auto& group : unit.groups) {
      std::string dtype = c10::toString(group.dtype);
      if (group.compute_dtype != group.dtype) dtype += fmt::format(" as {}", c10::toString(group.compute_dtype));
      if (!group.trainable) dtype += " frozen";
      if (group.replicated) dtype += " whole";
      text += fmt::format("{:<{}}  {:>10}  {:>14}  {:<18}  {:>12}  {:>5.1f}%\n", unit.name.empty() ? "(root)" : unit.name, width,
                          group.parameters.size(), group.numel(), dtype, human_bytes(group.shard_numel * bytes_of(group.dtype)),
                          100.0 * group.numel() / total);
    }
  text += fmt::format("{} elements in {} units over {} rank{}: {} of parameters per rank, {} when whole{}\n", numel(), units.size(),
                      world_size, world_size == 1 ? "" : "s", human_bytes(shard_bytes()), human_bytes(unsharded_bytes()),
                      max_unsharded_bytes ? fmt::format(", at most {} at once", human_bytes(max_unsharded_bytes)) : "");
  for (const auto& unit : units)
    for (const auto& group : unit.groups)
      for (const auto& parameter : group.parameters)
        if (!parameter.other_names.empty()) text += fmt::format("{} is also {}\n", parameter.name, fmt::join(parameter.other_names, ", "));
  return text;
}

std::vector<std::string> agreement_lines(const Plan& plan) {
  std::vector<std::string> lines{fmt::format("world size {}, at most {} bytes unsharded", plan.world_size, plan.max_unsharded_bytes)};
  for (const auto& unit : plan.units)
    for (const auto& group : unit.groups)
      for (const auto& parameter : group.parameters)
        lines.push_back(fmt::format("unit '{}', {} computing in {}, reducing in {}, {}{}{}: {} [{}] at {}{}{}", unit.name,
                                    c10::toString(group.dtype), c10::toString(group.compute_dtype), c10::toString(group.reduce_dtype),
                                    group.trainable ? "trainable" : "frozen", group.kept_wide ? ", kept wide" : "",
                                    group.replicated ? ", whole on every rank" : "", parameter.name, fmt::join(parameter.shape, ", "),
                                    parameter.offset, parameter.other_names.empty() ? "" : ", also ",
                                    fmt::join(parameter.other_names, ", ")));
  return lines;
}

}  // namespace fsdp
