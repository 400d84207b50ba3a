// How a plain model becomes a sharded one: ShardedModel::shard and its steps. Nothing of the user's model changes before every
// check has passed and every shard is filled.

#include <ATen/ops/cat.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include <map>

#include "runtime/access_key.h"
#include "runtime/gradient_sink.h"
#include "runtime/registry.h"
#include "runtime/sharded_model.h"
#include "runtime/watched_weights.h"

namespace fsdp {

void check_can_be_sharded(const std::string& name, const at::Tensor& tensor, int rank) {
  TORCH_CHECK(!registry::is_sharded(tensor), "rank ", rank, ": parameter '", name,
              "' is sharded already: this module, or a part of it, was wrapped before. Wrap a model once, at its root; to wrap it anew, "
              "destroy the first "
              "wrapper and build a new module");
  const auto tracked = registry::find(tensor);
  TORCH_CHECK(!tracked || tracked->kind != TrackedTensor::Kind::DERIVED, "rank ", rank, ": parameter '", name,
              "' was computed from slices of a sharded model, so it holds one rank's part of a parameter. Make the copy (clone()) before "
              "wrapping, or inside summon_full_params()");
  TORCH_CHECK(tensor.layout() == at::kStrided, "rank ", rank, ": parameter '", name, "' has layout ", tensor.layout(),
              "; only strided (dense) parameters can be sharded");
  TORCH_CHECK(tensor.device().is_cpu(), "rank ", rank, ": parameter '", name, "' is on device ", tensor.device(),
              "; expected cpu, the group's device");
  TORCH_CHECK(!tensor.is_quantized(), "rank ", rank, ": parameter '", name,
              "' is a quantized tensor; keep the packed bytes as a plain uint8 parameter");
  TORCH_CHECK(!tensor.is_inference(), "rank ", rank, ": parameter '", name,
              "' was made under InferenceMode and cannot be trained; build the model outside it");
  TORCH_CHECK(tensor.is_leaf(), "rank ", rank, ": parameter '", name,
              "' is the result of an operator, not a leaf; register a tensor made with requires_grad");
  TORCH_CHECK(!tensor.grad().defined(), "rank ", rank, ": parameter '", name,
              "' already has a gradient of the full shape; call zero_grad() before wrapping");
}

std::shared_ptr<ShardedModel> ShardedModel::shard(PlannedModel planned, std::shared_ptr<comm::Collectives> collectives,
                                                  const ShardingOptions& options) {
  c10::InferenceMode not_inference(false);
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  std::shared_ptr<ShardedModel> model(new ShardedModel(planned.plan, std::move(collectives)));
  model->build_units(planned);
  model->write_through_ = options.write_through;
  model->param_dtype_ = options.param_dtype;
  model->casts_inputs_ = options.casts_inputs;
  model->fill_shards(planned, options.sync_from_rank_0);
  model->attach_handles();
  return model;
}

void ShardedModel::build_units(const PlannedModel& planned) {
  for (size_t u = 0; u < planned.tensors.size(); ++u) {
    const auto& from = plan_.units[u];
    auto unit = std::make_unique<Unit>();
    unit->name = from.name;
    unit->index = u;
    unit->title = from.name.empty() ? "the root unit" : "unit '" + from.name + "'";
    for (size_t g = 0; g < from.groups.size(); ++g)
      unit->groups.push_back(std::make_unique<FlatGroup>(unit->title, from.groups[g], planned.tensors[u][g], world_size(), rank()));
    units_.push_back(std::move(unit));
  }
  scheduler_ = std::make_unique<Scheduler>(collectives_, units_, planned.budget);
  reducer_ = std::make_unique<Reducer>(collectives_, units_);
}

void ShardedModel::fill_shard(FlatGroup& group, bool from_rank_0) {
  if (!from_rank_0 || group.layout.unsharded_numel() == 0) return group.fill_shard_from_handles();
  auto flat = rank() == 0 ? group.flatten_handles() : at::zeros({group.layout.unsharded_numel()}, at::dtype(group.dtype));
  collectives_.broadcast(flat, 0, group.unit_title + ", wrap").wait();
  group.fill_shard_from(flat);
}

void ShardedModel::fill_shards(const PlannedModel& planned, bool sync_from_rank_0) {
  const bool broadcast = sync_from_rank_0 && world_size() > 1;
  for (const auto& unit : units_)
    for (const auto& group : unit->groups) fill_shard(*group, broadcast);
  if (!broadcast) return;
  std::map<c10::ScalarType, std::vector<at::Tensor>> by_dtype;
  for (const auto& buffer : planned.buffers)
    if (buffer.tensor.numel()) by_dtype[buffer.tensor.scalar_type()].push_back(buffer.tensor);
  for (auto& [dtype, buffers] : by_dtype) {
    std::vector<at::Tensor> parts;
    for (const auto& buffer : buffers) parts.push_back(buffer.reshape({-1}));
    auto flat = at::cat(parts);
    collectives_.broadcast(flat, 0, "buffers, wrap").wait();
    int64_t begin = 0;
    for (auto& buffer : buffers) {
      buffer.copy_(flat.narrow(0, begin, buffer.numel()).view(buffer.sizes()));
      begin += buffer.numel();
    }
  }
}

void ShardedModel::attach_handles() {
  for (const auto& unit : units_)
    for (const auto& group : unit->groups) attach_handles(*unit, *group);
}

void ShardedModel::attach_handles(Unit& unit, FlatGroup& group) {
  group.hold_full();  // a sink records shape and dtype of the computing state
  for (auto& parameter : group.parameters) {
    if (c10::isFloatingType(group.dtype) || c10::isComplexType(group.dtype))
      parameter.sink = std::make_shared<GradientSink>(parameter, weak_from_this());
    registry::add(parameter, *this, unit);
  }
  group.hold_slices();
  if (group.replicated) {  // no operator on it is any concern of the hook, but that of an adapter's products
    for (const auto& parameter : group.parameters) watched_weights::keep_watching(parameter.handle);
    return;
  }
  registry::add(group.unsharded, TrackedTensor::Kind::UNSHARDED, *this, unit, group);
  registry::add(group.shard, TrackedTensor::Kind::SHARD, *this, unit, group);
  registry::add(group.shard_gradient, TrackedTensor::Kind::GRADIENT, *this, unit, group);
}

void ShardedModel::add_replicas(const PlannedModel& planned) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!computing() && !in_backward_, "rank ", rank(),
              ": parameters cannot be added while the model is running; do it between steps");
  c10::InferenceMode not_inference(false);
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  auto& unit = *units_.front();
  const auto& groups = planned.plan.units.front().groups;
  for (size_t g = 0; g < groups.size(); ++g) {
    auto group = std::make_unique<FlatGroup>(unit.title, groups[g], planned.tensors.front()[g], world_size(), rank());
    fill_shard(*group, world_size() > 1);
    attach_handles(unit, *group);
    reducer_->add(*group);
    unit.groups.push_back(std::move(group));
    plan_.units.front().groups.push_back(groups[g]);
  }
}

}  // namespace fsdp
