#include "runtime/reducer.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/real.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/access_key.h"
#include "runtime/gradient_sink.h"

namespace fsdp {
namespace {

// What the user did to .grad since the last reduction decides what a new one does.
enum class Existing { NONE, OURS, ASSIGNED };

Existing existing_gradient(const ShardedParameter& parameter) {
  const auto& grad = parameter.handle.grad();
  if (!grad.defined()) return Existing::NONE;
  return grad.unsafeGetTensorImpl() == parameter.gradient_slice.unsafeGetTensorImpl() ? Existing::OURS : Existing::ASSIGNED;
}

}  // namespace

void check_assigned_gradient(const ShardedParameter& parameter, int rank) {
  if (existing_gradient(parameter) != Existing::ASSIGNED) return;
  const auto& grad = parameter.handle.grad();
  TORCH_CHECK(grad.sizes() == parameter.gradient_slice.sizes() && grad.scalar_type() == parameter.gradient_slice.scalar_type(), "rank ",
              rank, ": .grad of parameter '", parameter.name, "' was assigned a tensor of shape ", grad.sizes(), " and dtype ",
              grad.scalar_type(), "; a sharded parameter's gradient is this rank's slice, of shape ", parameter.gradient_slice.sizes(),
              " and dtype ", parameter.gradient_slice.scalar_type(),
              ". Assign a tensor like the .grad found there, or call zero_grad() before backward");
}

void take_over_assigned_gradient(ShardedParameter& parameter) {
  if (existing_gradient(parameter) != Existing::ASSIGNED) return;
  parameter.group->allocate_shard_gradient();
  parameter.gradient_slice.copy_(parameter.handle.grad());
  at::AutoDispatchBelowADInplaceOrView no_views;
  parameter.handle.mutable_grad() = parameter.gradient_slice;
}

Reducer::Reducer(CountedCollectives& collectives, std::vector<std::unique_ptr<Unit>>& units)
    : collectives_(collectives), divisor_(collectives.world_size()) {
  for (const auto& unit : units)
    for (const auto& group : unit->groups) add(*group);
}

void Reducer::add(FlatGroup& group) {
  GroupGradient gradient;
  gradient.group = &group;
  gradient.has.assign(group.parameters.size(), false);
  gradient.defines.assign(group.parameters.size(), false);
  gradients_.push_back(std::move(gradient));
}

Reducer::GroupGradient& Reducer::of(const FlatGroup& group) {
  return *std::find_if(gradients_.begin(), gradients_.end(), [&](const GroupGradient& g) { return g.group == &group; });
}

void Reducer::begin_backward(bool syncs) {
  syncs_ = syncs;
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  const auto* needed = torch::autograd::get_current_graph_task_exec_info();  // empty: everything runs
  for (auto& gradient : gradients_) {
    gradient.expected = 0;
    for (const auto& parameter : gradient.group->parameters) {
      auto* sink = parameter.sink.get();
      if (!sink || !nodes->count(sink)) continue;
      const auto found = needed->find(sink);
      if (needed->empty() || (found != needed->end() && found->second.needed_)) ++gradient.expected;
    }
  }
}

void Reducer::receive(ShardedParameter& parameter, const at::Tensor& value) {
  auto& gradient = of(*parameter.group);
  const auto& layout = parameter.group->layout;
  if (in_flight_ == &gradient) finish_in_flight();  // a second graph task brings another gradient to a group under way
  ++gradient.arrived;
  if (value.defined()) {
    TORCH_CHECK(value.layout() == at::kStrided, "rank ", collectives_.rank(), ": parameter '", parameter.name,
                "' got a gradient of layout ", value.layout(),
                ", which cannot enter a flat gradient buffer. Build its module without sparse gradients (EmbeddingOptions::sparse(false))");
    TORCH_CHECK(!value.requires_grad(), "rank ", collectives_.rank(), ": backward(create_graph=true) into .grad of sharded parameter '",
                parameter.name, "' is not supported: the sharded gradient has no graph. Use torch::autograd::grad(..., create_graph=true)");
    if (collectives_.world_size() == 1) {  // nothing to reduce
      const auto whole = parameter.in_memory_order(value);
      return add_to_shard(gradient, parameter, divisor_ == 1 ? whole : whole.to(parameter.group->dtype).div(divisor_));
    }
    if (!gradient.flat.defined()) {
      gradient.flat = pool_.take(layout.gradient_numel(), parameter.group->reduce_dtype);
      buffer_bytes_ += static_cast<int64_t>(gradient.flat.nbytes());
      peak_buffer_bytes_ = std::max(peak_buffer_bytes_, buffer_bytes_);
    }
    const auto source = parameter.in_memory_order(value);
    for (const auto& run : layout.gradient_runs(parameter.index)) {
      auto target = gradient.flat.narrow(0, run.begin_in_gradient, run.length);
      const auto part = source.narrow(0, run.begin_in_parameter, run.length);
      if (gradient.has[parameter.index]) {
        target.add_(part.to(target.scalar_type()).div(divisor_));
      } else if (part.scalar_type() == target.scalar_type()) {
        at::div_out(target, part, at::Scalar(divisor_));
      } else {  // divided after the cast: the wider type rounds less
        target.copy_(part).div_(divisor_);
      }
    }
    gradient.has[parameter.index] = true;
  }
  if (syncs_ && gradient.arrived == gradient.expected && gradient.flat.defined()) start(gradient);
}

void Reducer::start(GroupGradient& gradient) {
  finish_in_flight();
  const FlatGroup& group = *gradient.group;
  in_flight_ = &gradient;
  RECORD_FUNCTION("fsdp::reduce " + group.unit_title, {});
  const auto& layout = group.layout;
  auto counts = at::zeros({layout.counts_numel()}, at::dtype(at::kFloat));
  for (size_t i = 0; i < gradient.has.size(); ++i) {
    counts.data_ptr<float>()[i] = gradient.has[i] ? 1.f : 0.f;
    if (gradient.has[i]) continue;
    for (const auto& run : layout.gradient_runs(static_cast<int64_t>(i)))
      gradient.flat.narrow(0, run.begin_in_gradient, run.length).zero_();
  }
  for (int rank = 0; rank < layout.world_size(); ++rank)
    gradient.flat.narrow(0, rank * layout.gradient_shard_numel() + layout.shard_numel(), layout.counts_numel()).copy_(counts);
  auto own = gradient.flat.narrow(0, group.rank * layout.gradient_shard_numel(), layout.gradient_shard_numel());
  const auto purpose = group.unit_title + (group.replicated ? ", replicas, backward" : ", backward");
  pending_ = group.replicated ? collectives_.all_reduce(gradient.flat, purpose) : collectives_.reduce_scatter(own, gradient.flat, purpose);
}

void Reducer::finish_in_flight() {
  if (!in_flight_) return;
  auto& gradient = *std::exchange(in_flight_, nullptr);
  FlatGroup& group = *gradient.group;
  const auto& layout = group.layout;
  pending_.wait();
  const auto own = gradient.flat.narrow(0, group.rank * layout.gradient_shard_numel(), layout.gradient_shard_numel());
  const auto counts = at::real(own.narrow(0, layout.shard_numel(), layout.counts_numel())).to(at::kFloat);
  for (auto& parameter : group.parameters) {
    if (counts.data_ptr<float>()[parameter.index] < 0.5f) continue;
    const ShardSlice part = layout.slice(parameter.index, group.rank);
    add_to_shard(gradient, parameter, own.narrow(0, part.begin_in_shard, part.length));
  }
  buffer_bytes_ -= static_cast<int64_t>(gradient.flat.nbytes());
  pool_.give_back(std::exchange(gradient.flat, {}));
  gradient.has.assign(gradient.has.size(), false);
  gradient.arrived = 0;
}

void Reducer::add_to_shard(GroupGradient& gradient, ShardedParameter& parameter, const at::Tensor& reduced) {
  FlatGroup& group = *gradient.group;
  group.allocate_shard_gradient();
  const ShardSlice part = group.layout.slice(parameter.index, group.rank);
  auto target = group.shard_gradient.narrow(0, part.begin_in_shard, part.length);
  // A gradient reduced earlier in this backward counts as existing, although .grad does not show it yet.
  const Existing existing = gradient.defines[parameter.index] ? Existing::OURS : existing_gradient(parameter);
  if (existing == Existing::ASSIGNED) {
    check_assigned_gradient(parameter, group.rank);
    parameter.gradient_slice.copy_(parameter.handle.grad());
  }
  existing == Existing::NONE ? target.copy_(reduced) : target.add_(reduced);
  gradient.defines[parameter.index] = true;
}

void Reducer::finish_backward() {
  for (auto& gradient : gradients_)
    if (syncs_ && gradient.flat.defined() && in_flight_ != &gradient) start(gradient);
  finish_in_flight();
  at::AutoDispatchBelowADInplaceOrView no_views;  // else zero_grad(set_to_none=false) cannot detach what it finds in .grad
  for (auto& gradient : gradients_) {
    gradient.arrived = 0;
    for (auto& parameter : gradient.group->parameters)
      if (gradient.defines[parameter.index]) parameter.handle.mutable_grad() = parameter.gradient_slice;
    gradient.defines.assign(gradient.defines.size(), false);
  }
}

void Reducer::drop_held() {
  for (auto& gradient : gradients_) {
    if (!gradient.flat.defined()) continue;
    buffer_bytes_ -= static_cast<int64_t>(gradient.flat.nbytes());
    pool_.give_back(std::exchange(gradient.flat, {}));
    gradient.has.assign(gradient.has.size(), false);
  }
}

void Reducer::abandon_backward() noexcept {
  // Not waited for: a rank that failed alone would wait for ranks that never come. The operation keeps its buffer until it ends.
  pending_ = {};
  in_flight_ = nullptr;
  buffer_bytes_ = 0;
  for (auto& gradient : gradients_) {
    gradient.flat.reset();
    gradient.arrived = 0;
    gradient.has.assign(gradient.has.size(), false);
    gradient.defines.assign(gradient.defines.size(), false);
  }
}

}  // namespace fsdp
