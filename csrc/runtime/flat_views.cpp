#include "runtime/flat_views.h"

#include <utility>

#include "runtime/registry.h"
#include "runtime/sharded_model.h"

namespace fsdp {

std::vector<Stretch> stretches_of(const FlatGroupView& group, const std::function<bool(size_t)>& chosen,
                                  const std::function<bool(size_t, size_t)>& joins) {
  std::vector<Stretch> stretches;
  size_t left = 0;
  bool open = false;  // the slice before this one ends the last stretch
  for (size_t i = 0; i < group.parameters.size(); ++i) {
    const auto& slice = group.parameters[i];
    if (slice.length == 0) continue;
    if (chosen(i)) {
      if (open && (!joins || joins(left, i)))
        stretches.back().length = slice.begin + slice.length - stretches.back().begin;
      else
        stretches.push_back({slice.begin, slice.length, i});
    }
    open = chosen(i);
    left = i;
  }
  return stretches;
}

at::Tensor ParameterView::slice_of(const at::Tensor& whole) const {
  TORCH_INTERNAL_ASSERT(whole.sizes() == at::IntArrayRef(shape));
  return (memory_order.empty() ? whole : whole.permute(memory_order)).reshape({-1}).narrow(0, begin_in_parameter, length);
}

FlatViews::FlatViews(std::shared_ptr<ShardedModel> model) : model_(std::move(model)) {
  for (const auto& unit : model_->units())
    for (const auto& group : unit->groups) {
      FlatGroupView view{group->unit_title, group->replicated, group->shard, group->shard_gradient, {}};
      for (const auto& parameter : group->parameters) {
        const ShardSlice slice = group->layout.slice(parameter.index, group->rank);
        view.parameters.push_back({parameter.name, parameter.handle, slice.begin_in_shard, slice.length, slice.begin_in_parameter,
                                   parameter.full_shape, parameter.memory_order});
      }
      groups_.push_back(std::move(view));
      units_.push_back(unit.get());
      sources_.push_back(group.get());
    }
}

int FlatViews::rank() const { return model_->rank(); }
comm::Collectives& FlatViews::collectives() const { return model_->collectives().seam(); }

void FlatViews::settle(const char* who) {
  for (const auto& group : groups_)
    for (const auto& parameter : group.parameters) {
      TORCH_CHECK(registry::is_sharded(parameter.handle), "rank ", rank(), ": ", who, ": parameter '", parameter.name,
                  "' is not sharded any more, its model was unwrapped. Build a new optimizer (and scaler) over what unwrap() returned");
      return model_->take_over_assigned(who);  // unwrapping frees all or none
    }
}

void FlatViews::were_written(size_t group, const std::vector<size_t>& parameters) {
  for (const size_t p : parameters) groups_[group].parameters[p].handle.unsafeGetTensorImpl()->bump_version();
  // What is replicated is nowhere gathered, and a frozen base beside it stays where it is.
  if (!parameters.empty() && !groups_[group].replicated) model_->shard_was_written(*units_[group]);
}

std::vector<at::Tensor> FlatViews::whole(size_t group, const at::Tensor& flat, const char* purpose) {
  const FlatGroup& source = *sources_[group];
  const auto gathered = model_->gather_flat(source, flat, purpose);
  std::vector<at::Tensor> result;
  for (const auto& parameter : source.parameters) result.push_back(source.plain(parameter, gathered));
  return result;
}

void FlatViews::found_non_finite(at::Tensor found) { model_->gradient_check() = {std::move(found), false}; }

bool FlatViews::any_found_non_finite(const char* purpose) {
  auto& check = model_->gradient_check();
  TORCH_INTERNAL_ASSERT(check.found.defined());
  if (!std::exchange(check.agreed, true) && model_->world_size() > 1) model_->collectives().all_reduce(check.found, purpose).wait();
  return check.found.item<float>() > 0;
}

}  // namespace fsdp
