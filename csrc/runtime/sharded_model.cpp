#include "runtime/sharded_model.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/alias.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cmath>

#include "runtime/access_key.h"
#include "runtime/gradient_sink.h"
#include "runtime/registry.h"

namespace fsdp {

// Lives in the callback that the engine runs when a graph task is done. After a failed backward the engine drops its callbacks
// uncalled, but destroys them: the guard notices.
class ShardedModel::BackwardGuard {
 public:
  explicit BackwardGuard(std::weak_ptr<ShardedModel> model) : model_(std::move(model)) {}
  BackwardGuard(const BackwardGuard&) = delete;
  BackwardGuard& operator=(const BackwardGuard&) = delete;
  ~BackwardGuard() {
    if (const auto model = model_.lock()) model->fail_backward();
  }
  void succeeded() {
    const auto model = std::exchange(model_, {}).lock();
    if (model) model->finish_backward();
  }

 private:
  std::weak_ptr<ShardedModel> model_;
};

ShardedModel::ShardedModel(Plan plan, std::shared_ptr<comm::Collectives> collectives)
    : plan_(std::move(plan)), collectives_(std::move(collectives)) {}

ShardedModel::~ShardedModel() { registry::remove_all(*this); }

Stats ShardedModel::stats() const {
  std::lock_guard lock(mutex_);
  Stats stats;
  stats.collectives = collectives_.counts();
  for (const auto& unit : units_)
    for (const auto& group : unit->groups) {
      stats.shard_bytes += static_cast<int64_t>(group->shard.nbytes());
      stats.gradient_bytes += group->shard_gradient_bytes();
    }
  stats.resident_unsharded_bytes = scheduler_->resident_bytes();
  stats.peak_unsharded_bytes = scheduler_->peak_bytes();
  stats.prefetches = scheduler_->prefetches();
  stats.prefetch_hits = scheduler_->prefetch_hits();
  stats.buffer_allocations = scheduler_->allocations() + reducer_->allocations();
  stats.peak_gradient_buffer_bytes = reducer_->peak_buffer_bytes();
  return stats;
}

void ShardedModel::enter_computing() {
  std::lock_guard lock(mutex_);
  if (brackets_ == 0) {
    WithoutAccessHook no_hook;
    adopt_assigned();
    for (const auto& unit : units_)
      for (const auto& group : unit->groups) group->hold_full();
    drop_unused_aliases();
    backward_ended_in_bracket_ = false;
  }
  ++brackets_;
}

void ShardedModel::leave_computing() noexcept {
  std::lock_guard lock(mutex_);
  if (--brackets_ > 0) return;
  WithoutAccessHook no_hook;
  for (const auto& unit : units_)
    for (const auto& group : unit->groups) group->hold_slices();
  // With a graph that may still run backward, the units used last stay for it; without one nothing will read them.
  if (!c10::GradMode::is_enabled() || backward_ended_in_bracket_) scheduler_->end_of_step();
}

void ShardedModel::acquire(const std::vector<Unit*>& wanted) {
  std::lock_guard lock(mutex_);
  const bool in_graph_task = torch::autograd::get_current_graph_task_id() >= 0;
  if (in_graph_task) enter_backward();
  const Phase forward = c10::GradMode::is_enabled() ? Phase::FORWARD : Phase::FORWARD_WITHOUT_GRADIENTS;
  scheduler_->acquire(wanted, in_graph_task ? Phase::BACKWARD : forward);
}

void ShardedModel::release(const std::vector<Unit*>& pinned) noexcept {
  std::lock_guard lock(mutex_);
  scheduler_->release(pinned, Phase::FORWARD);
}

void ShardedModel::summon(const std::vector<Unit*>& summoned, bool write_back) {
  std::lock_guard lock(mutex_);
  scheduler_->acquire(summoned, Phase::SUMMON);
  writable_summons_ += write_back;
}

void ShardedModel::dismiss(const std::vector<Unit*>& summoned, bool write_back) noexcept {
  std::lock_guard lock(mutex_);
  if (write_back) {
    at::AutoDispatchBelowAutograd below_autograd;
    WithoutAccessHook no_hook;
    for (Unit* unit : summoned)
      for (const auto& group : unit->groups) group->keep_changes();
    --writable_summons_;
  }
  scheduler_->release(summoned, Phase::SUMMON);
  scheduler_->free_all();
}

std::vector<Unit*> ShardedModel::units_named(const std::vector<std::string>& names) const {
  std::vector<Unit*> found;
  if (names.empty())
    for (const auto& unit : units_) found.push_back(unit.get());
  for (const auto& name : names) {
    const auto unit = std::find_if(units_.begin(), units_.end(), [&](const auto& u) { return u->name == name; });
    std::string known;
    for (const auto& u : units_) known += (known.empty() ? "'" : ", '") + u->name + "'";
    TORCH_CHECK(unit != units_.end(), "rank ", rank(), ": there is no unit '", name, "'; the plan has ", known);
    found.push_back(unit->get());
  }
  return found;
}

void ShardedModel::keep_written(FlatGroup& group, const at::Tensor& written) {
  std::lock_guard lock(mutex_);
  at::AutoDispatchBelowAutograd below_autograd;
  WithoutAccessHook no_hook;
  for (auto* parameter : group.parameters_under(written)) group.keep_written(*parameter);
}

// The graph must never hold the user's own tensor object, whose content changes. The kernel gets an alias instead: an object of
// its own on the same storage, with the same version counter. One alias serves all forwards of a backward: with one per access,
// autograd would sum the gradients of a parameter used twice in another order than the plain run does.
at::Tensor ShardedModel::alias_of(ShardedParameter& parameter) {
  std::lock_guard lock(mutex_);
  const bool grad_mode = c10::GradMode::is_enabled();
  auto& cached = parameter.aliases[grad_mode];
  const auto& handle = parameter.handle;
  const auto version = handle._version();
  const bool valid =
      cached.tensor.defined() && cached.version == version && (!grad_mode || cached.tensor.requires_grad() == handle.requires_grad());
  if (!valid) cached = {at::alias(handle), static_cast<uint32_t>(version)};
  return cached.tensor;
}

at::Tensor ShardedModel::saved_handle(ShardedParameter& parameter) {
  if (!c10::GradMode::is_enabled() || !parameter.handle.requires_grad()) return parameter.full;
  at::AutoDispatchBelowAutograd below_autograd;
  auto whole = at::alias(parameter.full);
  torch::autograd::impl::set_version_counter(whole, torch::autograd::impl::version_counter(parameter.handle));
  torch::autograd::impl::set_gradient_edge(whole, {parameter.sink, 0});
  return whole;
}

// The engine runs younger nodes first. An alias kept from an earlier step would be older than everything in this one, and its
// gradient would be delivered after all others: so one is not used again after the backward that freed its graph, nor when no graph
// holds it any more.
void ShardedModel::drop_unused_aliases() {
  for (const auto& unit : units_)
    for (const auto& group : unit->groups)
      for (auto& parameter : group->parameters) {
        auto& [alias, version] = parameter.aliases[true];
        if (!alias.defined()) continue;
        // In this order: asking for the grad_fn of a view whose base has changed makes a new one.
        if (version != parameter.handle._version() || !alias.grad_fn() || alias.grad_fn().use_count() == 1) alias.reset();
      }
}

void ShardedModel::drop_aliases_with_graph() {
  for (const auto& unit : units_)
    for (const auto& group : unit->groups)
      for (auto& parameter : group->parameters) parameter.aliases[true].tensor.reset();
}

void ShardedModel::receive_gradient(ShardedParameter& parameter, const at::Tensor& gradient) {
  std::lock_guard lock(mutex_);
  enter_backward();
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  reducer_->receive(parameter, gradient);
}

bool ShardedModel::set_syncs_gradients(bool syncs) { return syncs_gradients_.exchange(syncs); }

void ShardedModel::set_gradient_divisor(double divisor) {
  TORCH_CHECK(divisor > 0 && std::isfinite(divisor), "rank ", rank(), ": the gradient divisor must be positive and finite, got ", divisor);
  std::lock_guard lock(mutex_);
  reducer_->set_divisor(divisor);
}

void ShardedModel::drop_held_gradients() {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(!in_backward_, "rank ", rank(), ": zero_grad() while backward is running");
  reducer_->drop_held();
}

void ShardedModel::shard_was_written(Unit& unit) {
  std::lock_guard lock(mutex_);
  scheduler_->free(unit);
}

void ShardedModel::enter_backward() {
  if (std::exchange(in_backward_, true)) return;
  reducer_->begin_backward(syncs_gradients_);
  graph_is_kept_ = torch::autograd::get_current_graph_task_keep_graph();
  torch::autograd::Engine::get_default_engine().queue_callback(
      [guard = std::make_shared<BackwardGuard>(weak_from_this())] { guard->succeeded(); });
}

void ShardedModel::finish_backward() {
  std::lock_guard lock(mutex_);
  in_backward_ = false;
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  try {
    reducer_->finish_backward();
  } catch (...) {
    reducer_->abandon_backward();
    scheduler_->end_of_step();
    throw;
  }
  if (!graph_is_kept_) drop_aliases_with_graph();
  backward_ended_in_bracket_ = computing();
  if (!computing()) scheduler_->end_of_step();
}

void ShardedModel::fail_backward() noexcept {
  std::lock_guard lock(mutex_);
  in_backward_ = false;
  WithoutAccessHook no_hook;
  reducer_->abandon_backward();
  if (!computing()) scheduler_->end_of_step();
}

}  // namespace fsdp
