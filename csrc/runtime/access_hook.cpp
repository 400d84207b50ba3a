// The access hook: a boxed fallback under kAccessKey. It sees every operator that touches a sharded parameter or a view of one,
// gathers what the operator is about to read, and passes the call on below the key.
//
// Design note: docs/design/gather_on_access.md.

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <vector>

#include "runtime/access_key.h"
#include "runtime/flat_group.h"
#include "runtime/operator_arguments.h"
#include "runtime/precision.h"
#include "runtime/registry.h"
#include "runtime/sharded_model.h"
#include "runtime/slice_rules.h"
#include "runtime/watched_weights.h"

namespace fsdp {
namespace {

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The units that one operator reads, pinned until it returns; per model, since each has its own lock and order.
class Pins {
 public:
  Pins() = default;
  Pins(const Pins&) = delete;
  Pins& operator=(const Pins&) = delete;
  ~Pins() {
    for (auto& [model, units] : pinned_) model->release(units);
  }

  void want(ShardedModel* model, Unit* unit) {
    auto entry = std::find_if(wanted_.begin(), wanted_.end(), [&](const auto& e) { return e.first == model; });
    if (entry == wanted_.end()) entry = wanted_.insert(wanted_.end(), {model, {}});
    auto& units = entry->second;
    if (std::find(units.begin(), units.end(), unit) == units.end()) units.push_back(unit);
  }

  void acquire() {
    for (auto& [model, units] : wanted_) {
      model->acquire(units);
      pinned_.emplace_back(model, units);
    }
  }

 private:
  using UnitsOfModel = std::pair<ShardedModel*, std::vector<Unit*>>;
  std::vector<UnitsOfModel> wanted_, pinned_;
};

std::string name_of(const TrackedTensor& tracked, const at::Tensor& tensor) {
  if (tracked.parameter) return "'" + tracked.parameter->name + "'";
  const auto reached = tracked.group->parameters_under(tensor);
  return reached.empty() ? "of " + tracked.group->unit_title : "'" + reached.front()->name + "'";
}

// t_, unsqueeze_, detach_ and the like write no element: the tensor object itself becomes a view of another shape or history. That is its
// holder's business where it is a view (median's kernel does so), but a handle's shape is the shard's, and the kernel gets an alias.
void check_inplace_view(const c10::FunctionSchema& schema, const TrackedTensor& tracked, const at::Tensor& tensor) {
  const auto& name = schema.name();
  TORCH_CHECK(name != "aten::set_" && name != "aten::resize_" && name != "aten::resize_as_", name, " would give parameter ",
              name_of(tracked, tensor),
              " other memory while it is gathered, which sharding has no place for. Copy values with copy_ instead");
  TORCH_CHECK(tracked.kind != TrackedTensor::Kind::PARAMETER, name, " would make parameter ", name_of(tracked, tensor),
              " itself a view while it is gathered; it must keep the shape and the history that it was wrapped with. Use the form without "
              "the underscore, which returns a view");
}

void check_write(const c10::FunctionSchema& schema, const TrackedTensor& tracked, const at::Tensor& tensor) {
  TORCH_CHECK(tracked.model->writes_allowed(), schema.name(), " writes to parameter ", name_of(tracked, tensor),
              " while it is gathered; what is written there is lost when the parameter is freed. Wrap with .parameter_writes = "
              "ParameterWrites::WRITE_THROUGH if every rank writes the same values, write inside summon_full_params({.write_back = true}), "
              "or keep the "
              "value in a buffer");
}

// Gives its first argument other data altogether. Tensor::set_data is no operator, but asks the first of these before it acts; torch::load
// uses the second.
bool replaces_data(const c10::FunctionSchema& schema) {
  return schema.name() == "aten::_has_compatible_shallow_copy_type" || schema.name() == "aten::set_";
}

void access(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t first = stack->size() - arguments.size();
  const bool in_graph_task = torch::autograd::get_current_graph_task_id() >= 0;

  Pins pins;
  const ShardedModel* wide = nullptr;    // whose parameter, kept wide, is read
  const ShardedModel* narrow = nullptr;  // whose parameter in another dtype than its master's is read
  c10::SmallVector<SliceUse, 4> slices;
  std::vector<WrittenTensor> written_slices;
  std::vector<TrackedTensor> written_shards;
  std::vector<std::pair<TrackedTensor, at::Tensor>> written_gathered;
  {
    WithoutAccessHook no_hook;
    visit_tensors(*stack, first, arguments.size(), [&](const at::Tensor& tensor, size_t slot, size_t i) -> std::optional<at::Tensor> {
      if (!tensor.key_set().has(kAccessKey)) return std::nullopt;
      const auto tracked = registry::find(tensor);
      if (!tracked) {  // a plain model's watched weight; set_data would take the key from it
        if (slot == 0 && schema.name() == "aten::_has_compatible_shallow_copy_type" && watched_weights::observer_of(tensor))
          registry::add_access_key((*stack)[first + 1].toTensor());
        return std::nullopt;
      }
      const bool is_handle = tracked->kind == TrackedTensor::Kind::PARAMETER;
      const bool is_derived = tracked->kind == TrackedTensor::Kind::DERIVED;
      if (replaces_data(schema)) {  // at rest, the next bracket finds what it brought
        TORCH_CHECK(
            slot != 0 || !is_handle || !tracked->model->computing(), "parameter ", name_of(*tracked, tensor),
            " would be given other data (set_data, set_) in the middle of forward, and leave its shard. Copy values with copy_ (see "
            "ParameterWrites), or do it outside the wrapper");
        if (slot == 0 && is_handle) return std::nullopt;
        if (is_derived && schema.name() != "aten::set_") return std::nullopt;  // set_data copies the origin with the rest
      }
      const bool gathers = is_handle ? tracked->model->computing() || in_graph_task : tracked->kind == TrackedTensor::Kind::UNSHARDED;
      if (gathers) {
        if (is_written(arguments[slot]) && op.hasTag(at::Tag::inplace_view)) {
          check_inplace_view(schema, *tracked, tensor);
        } else if (is_written(arguments[slot])) {
          check_write(schema, *tracked, tensor);
          written_gathered.emplace_back(*tracked, is_handle ? tracked->parameter->full : tensor);
        }
        pins.want(tracked->model, tracked->unit);
        if (tracked->model->param_dtype() && tracked->model->computing()) {
          if (tracked->group->kept_wide) wide = tracked->model;
          if (tracked->group->compute_dtype == *tracked->model->param_dtype()) narrow = tracked->model;
        }
        if (!is_handle) return std::nullopt;
        return tracked->model->computing() ? tracked->model->alias_of(*tracked->parameter)
                                           : tracked->model->saved_handle(*tracked->parameter);
      }
      slices.push_back({*tracked, tensor.unsafeGetTensorImpl(), i, tensor.storage_offset(), tensor.numel(), tensor.requires_grad()});
      if (tracked->kind != TrackedTensor::Kind::GRADIENT && !is_derived && is_written(arguments[slot])) written_shards.push_back(*tracked);
      return std::nullopt;
    });
    if (!slices.empty()) written_slices = check_slice_arguments(schema, *stack, slices);
    pins.acquire();
  }
  const bool widened = wide && widen_arguments(schema, *stack, *wide->param_dtype());
  if (narrow && !wide && narrow->casts_inputs()) narrow_arguments(schema, *stack, *narrow->param_dtype());
  // The key stays included: the operator may be made of others that touch further units, or reduce slices. Pointwise ones do neither, and
  // their forms for numbers call those for tensors.
  std::optional<WithoutAccessHook> no_hook;
  if (!slices.empty() && op.hasTag(at::Tag::pointwise)) no_hook.emplace();
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kAccessKey), stack);
  no_hook.reset();
  if (widened) narrow_results(schema, *stack, *wide->param_dtype());
  if (!slices.empty()) check_slice_results(schema, *stack, slices, written_slices);
  for (const auto& [tracked, tensor] : written_gathered) tracked.model->keep_written(*tracked.group, tensor);
  for (const auto& tracked : written_shards) tracked.model->shard_was_written(*tracked.unit);
}

void on_access(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto product = watched_weights::product_of(op.schema(), *stack);
  if (!product) return access(op, keys, stack);
  {
    watched_weights::WithinProduct within;
    access(op, keys, stack);
  }
  stack->back() = product->observer->after_product(product->input, stack->back().toTensor());
}

}  // namespace
}  // namespace fsdp

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fsdp::on_access>()); }
