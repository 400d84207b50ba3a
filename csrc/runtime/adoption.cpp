// What happens to values that were put into sharded parameters behind the wrapper's back, and how a model becomes plain again.
//
// set_data, torch::load and Module::to pass no operator that could be intercepted; they show when the next bracket opens: the
// handle no longer lies in its shard.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>

#include "runtime/access_key.h"
#include "runtime/gradient_sink.h"
#include "runtime/reducer.h"
#include "runtime/registry.h"
#include "runtime/sharded_model.h"
#include "runtime/watched_weights.h"

namespace fsdp {
namespace {

bool lies_in_shard(const ShardedParameter& parameter) {
  const auto& handle = parameter.handle;
  return handle.has_storage() && handle.storage().unsafeGetStorageImpl() == parameter.group->shard.storage().unsafeGetStorageImpl() &&
         handle.storage_offset() == parameter.slice.storage_offset() && handle.numel() == parameter.slice.numel();
}

}  // namespace

void ShardedModel::check_adoptable() const {
  for (const auto& unit : units_)
    for (const auto& group : unit->groups)
      for (const auto& parameter : group->parameters) {
        const auto& handle = parameter.handle;
        TORCH_CHECK(
            group->keeps_master || !handle.requires_grad(), "rank ", rank(), ": parameter '", parameter.name,
            "' was frozen when the model was wrapped, so it is kept in ", group->dtype,
            " only, too coarse to be trained. Set MixedPrecision::keep_frozen_master = true to be able to thaw it, or leave it frozen");
        if (lies_in_shard(parameter)) continue;
        const bool known_shape = handle.sizes() == at::IntArrayRef(parameter.full_shape) || handle.sizes() == parameter.slice.sizes();
        TORCH_CHECK(known_shape && handle.scalar_type() == group->dtype && handle.device() == group->shard.device() &&
                        handle.layout() == at::kStrided,
                    "rank ", rank(), ": parameter '", parameter.name,
                    "' was given other data while sharded (set_data, Module::to or torch::load): shape ", handle.sizes(), ", dtype ",
                    handle.scalar_type(), ", device ", handle.device(), ". Expected the full shape ", at::IntArrayRef(parameter.full_shape),
                    " or this rank's slice ", parameter.slice.sizes(), " in dtype ", group->dtype, " on ", group->shard.device(),
                    ". Convert or load before wrapping, or unwrap() first");
      }
}

void ShardedModel::adopt_assigned() {
  check_adoptable();
  at::AutoDispatchBelowAutograd below_autograd;
  for (const auto& unit : units_)
    for (const auto& group : unit->groups)
      for (auto& parameter : group->parameters) {
        if (lies_in_shard(parameter)) continue;
        const ShardSlice part = group->layout.slice(parameter.index, group->rank);
        auto target = group->shard.narrow(0, part.begin_in_shard, part.length);
        const bool whole = parameter.handle.sizes() == at::IntArrayRef(parameter.full_shape);
        target.copy_(whole ? parameter.in_memory_order(parameter.handle).narrow(0, part.begin_in_parameter, part.length)
                           : parameter.handle);
        scheduler_->free(*unit);
      }
}

void ShardedModel::take_over_assigned(const char* who) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!computing() && !in_backward_, "rank ", rank(), ": ", who,
              " while the model is running; call it outside of model(x), model->method(x), model.call, summon_full_params and backward");
  WithoutAccessHook no_hook;
  c10::AutoGradMode no_grad(false);
  for (const auto& unit : units_)
    for (const auto& group : unit->groups)
      for (const auto& parameter : group->parameters) check_assigned_gradient(parameter, rank());
  adopt_assigned();
  for (const auto& unit : units_)
    for (const auto& group : unit->groups) {
      for (auto& parameter : group->parameters) take_over_assigned_gradient(parameter);
      const auto& parameters = group->parameters;
      // Else the next bracket would take over once more what has been stepped from by then.
      if (!std::all_of(parameters.begin(), parameters.end(), lies_in_shard)) group->hold_slices();
    }
}

at::Tensor ShardedModel::gather_flat(const FlatGroup& group, const at::Tensor& part, const char* purpose) {
  if (world_size() == 1 || group.replicated) return part;
  auto whole = at::empty({group.layout.unsharded_numel()}, part.options());
  if (whole.numel()) collectives_.all_gather(whole, part, group.unit_title + ", " + purpose).wait();
  return whole;
}

void ShardedModel::unshard_for_good() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!computing() && !in_backward_, "unwrap() while the model is running; call it between steps");
  WithoutAccessHook no_hook;
  c10::AutoGradMode no_grad(false);
  adopt_assigned();
  for (const auto& unit : units_)
    for (const auto& group : unit->groups) {
      bool has_gradients = false;  // alike on all ranks
      for (const auto& parameter : group->parameters) has_gradients = has_gradients || parameter.handle.grad().defined();
      const auto values = gather_flat(*group, group->shard, "unwrap");
      const auto gradients = has_gradients ? gather_flat(*group, group->shard_gradient, "gradients, unwrap") : at::Tensor();
      for (auto& parameter : group->parameters) {
        parameter.handle.set_data(group->plain(parameter, values));
        watched_weights::keep_watching(parameter.handle);
        torch::autograd::impl::set_grad_accumulator(parameter.handle, {});  // LibTorch makes its own when it needs one
        if (parameter.handle.grad().defined()) parameter.handle.mutable_grad() = group->plain(parameter, gradients);
      }
    }
  scheduler_->free_all();
  registry::remove_all(*this);
}

}  // namespace fsdp
