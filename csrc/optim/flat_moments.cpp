#include "optim/flat_moments.h"

#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

namespace fsdp {
namespace {

// bf16 and fp16 hold neither a small update nor a small square: their moments, and the arithmetic, are fp32.
c10::ScalarType moments_dtype(c10::ScalarType dtype) { return c10::isReducedFloatingType(dtype) ? at::kFloat : dtype; }

// Complex numbers are pairs of real ones to Adam.
at::Tensor as_real(const at::Tensor& run) { return run.is_complex() ? at::view_as_real(run).view(-1) : run; }

}  // namespace

FlatMoments::FlatMoments(const FlatGroupView& group, const std::vector<size_t>& parameters)
    : group_(group), member_of_(group.parameters.size(), -1) {
  for (const size_t p : parameters) {
    member_of_[p] = static_cast<int64_t>(members_.size());
    members_.push_back({p, 0, 0});
  }
  with_gradient_.assign(members_.size(), false);
  // Each stretch of the shard gets the next stretch of the moments.
  const auto stretches = stretches_of(group, [&](size_t p) { return member_of_[p] >= 0; });
  auto stretch = stretches.begin();
  for (auto& member : members_) {
    const auto& slice = group.parameters[member.parameter];
    if (slice.length == 0) continue;
    for (; slice.begin >= stretch->begin + stretch->length; ++stretch) moments_numel_ += stretch->length;
    member.begin = moments_numel_ + slice.begin - stretch->begin;
  }
  if (stretch != stretches.end()) moments_numel_ += stretch->length;
}

void FlatMoments::allocate() {
  const auto options = group_.shard.options().dtype(moments_dtype(group_.shard.scalar_type()));
  exp_avg_ = at::zeros({moments_numel_}, options);
  exp_avg_sq_ = at::zeros({moments_numel_}, options);
}

void FlatMoments::make_runs(const std::vector<bool>& with_gradient) {
  with_gradient_ = with_gradient;
  stepped_.clear();
  shard_runs_.clear();
  gradient_runs_.clear();
  runs_ = {};
  for (size_t m = 0; m < members_.size(); ++m)
    if (with_gradient[m]) stepped_.push_back(members_[m].parameter);
  const auto chosen = [&](size_t p) { return member_of_[p] >= 0 && with_gradient[member_of_[p]]; };
  const auto equally_often = [&](size_t left, size_t right) { return members_[member_of_[left]].step == members_[member_of_[right]].step; };
  for (const auto& run : stretches_of(group_, chosen, equally_often)) {
    const auto& first = members_[member_of_[run.first]];
    shard_runs_.push_back(as_real(group_.shard.narrow(0, run.begin, run.length)));
    gradient_runs_.push_back(as_real(group_.gradient.narrow(0, run.begin, run.length)));
    runs_.exp_avgs.push_back(as_real(exp_avg_.narrow(0, first.begin, run.length)));
    runs_.exp_avg_sqs.push_back(as_real(exp_avg_sq_.narrow(0, first.begin, run.length)));
    runs_.steps.push_back(at::full({}, static_cast<double>(first.step), group_.shard.options().dtype(at::kFloat)));
  }
}

const FlatMoments::Runs& FlatMoments::begin_step() {
  std::vector<bool> with_gradient(members_.size());
  bool any = false;
  for (size_t m = 0; m < members_.size(); ++m) {
    with_gradient[m] = group_.parameters[members_[m].parameter].has_gradient();
    any = any || with_gradient[m];
  }
  if (any && !exp_avg_.defined()) allocate();
  // The same parameters as in the step before: those of a run have been stepped equally often since, too.
  if (with_gradient != with_gradient_) make_runs(with_gradient);
  for (auto& step : runs_.steps) step.add_(1);
  for (size_t m = 0; m < members_.size(); ++m) members_[m].step += with_gradient[m];
  if (c10::isReducedFloatingType(group_.shard.scalar_type())) {
    runs_.parameters.clear();
    runs_.gradients.clear();
    for (size_t i = 0; i < shard_runs_.size(); ++i) {
      runs_.parameters.push_back(shard_runs_[i].to(at::kFloat));
      runs_.gradients.push_back(gradient_runs_[i].to(at::kFloat));
    }
  } else {
    runs_.parameters = shard_runs_;
    runs_.gradients = gradient_runs_;
  }
  return runs_;
}

const std::vector<size_t>& FlatMoments::end_step() {
  if (c10::isReducedFloatingType(group_.shard.scalar_type())) {
    for (size_t i = 0; i < shard_runs_.size(); ++i) shard_runs_[i].copy_(runs_.parameters[i]);
    runs_.parameters.clear();  // the wide copies of one flat group at a time
    runs_.gradients.clear();
  }
  return stepped_;
}

void FlatMoments::zero_grad() {
  for (const auto& member : members_) group_.parameters[member.parameter].handle.mutable_grad().reset();
}

void FlatMoments::add_state(std::vector<AdamState>& states) const {
  for (const auto& member : members_) {
    if (member.step == 0) continue;
    const auto& slice = group_.parameters[member.parameter];
    states.push_back(
        {slice.name, member.step, exp_avg_.narrow(0, member.begin, slice.length), exp_avg_sq_.narrow(0, member.begin, slice.length)});
  }
}

void FlatMoments::add_names(std::set<std::string>& names) const {
  for (const auto& member : members_) names.insert(group_.parameters[member.parameter].name);
}

void FlatMoments::restore(const std::map<std::string, int64_t>& steps) {
  bool any = false;
  for (auto& member : members_) {
    const auto found = steps.find(group_.parameters[member.parameter].name);
    member.step = found == steps.end() ? 0 : found->second;
    any = any || member.step > 0;
  }
  exp_avg_.reset();
  exp_avg_sq_.reset();
  if (any) allocate();
  with_gradient_.clear();  // unlike any: the next step makes its runs anew
}

}  // namespace fsdp
