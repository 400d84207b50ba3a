// A model whose parameters are sharded: the units, their residency, the reducer, and the steps between handle states.
//
// Events, and what they do:
//   enter_computing / leave_computing   the wrapper's bracket: handles hold the full shape while it is open
//   acquire / release                   the access hook, around each operator that reads units
//   receive_gradient                    a gradient sink, once per parameter and graph task
//   end of backward                     queued in the engine by whichever of the two comes first in a graph task
//
// Thread safety: every member takes the model's lock. Waiting for collectives happens under it, so two threads never interleave
// the collectives of one model.
#pragma once

#include <fsdp/plan.h>
#include <fsdp/stats.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "plan/planner.h"
#include "runtime/counters.h"
#include "runtime/gradient_check.h"
#include "runtime/reducer.h"
#include "runtime/scheduler.h"
#include "runtime/unit.h"

namespace fsdp {

struct ShardingOptions {
  bool sync_from_rank_0 = true;                               // values and buffers come from rank 0
  bool write_through = false;                                 // operators may write to gathered parameters
  std::optional<c10::ScalarType> param_dtype = std::nullopt;  // that activations have, where it is not the parameters' own
  bool casts_inputs = true;                                   // arguments that are wider than that are cast where they meet parameters
};

// Throws c10::Error that names the parameter, the reason and the remedy when it cannot be sharded.
void check_can_be_sharded(const std::string& name, const at::Tensor& tensor, int rank);

class ShardedModel : public std::enable_shared_from_this<ShardedModel> {
 public:
  // Shards the planned tensors. All ranks must call. No parameter changes before all shards are filled. REQUIRES: check_can_be_sharded of
  // every tensor.
  static std::shared_ptr<ShardedModel> shard(PlannedModel planned, std::shared_ptr<comm::Collectives> collectives,
                                             const ShardingOptions& options = {});
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  const Plan& plan() const { return plan_; }
  Stats stats() const;
  int rank() const { return collectives_.rank(); }
  int world_size() const { return collectives_.world_size(); }
  CountedCollectives& collectives() { return collectives_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }

  bool computing() const { return brackets_ > 0; }
  const std::optional<c10::ScalarType>& param_dtype() const { return param_dtype_; }
  bool casts_inputs() const { return casts_inputs_; }

  // Whether backwards that begin now reduce what they bring, and what is held from before. Returns what was so far.
  bool set_syncs_gradients(bool syncs);
  // What the sum of the ranks' gradients is divided by; the world size unless set.
  void set_gradient_divisor(double divisor);
  void drop_held_gradients();
  // Brackets nest. Entering the outermost takes over what was assigned to parameters meanwhile, or throws before anything changes.
  void enter_computing();
  void leave_computing() noexcept;

  void acquire(const std::vector<Unit*>& wanted);
  void release(const std::vector<Unit*>& pinned) noexcept;

  // Keeps these units whole (all of them: units()) until released. write_back: they may be written to, by operators and through pointers,
  // and each rank then keeps its part of what differs.
  void summon(const std::vector<Unit*>& summoned, bool write_back);
  void dismiss(const std::vector<Unit*>& summoned, bool write_back) noexcept;
  std::vector<Unit*> units_named(const std::vector<std::string>& names) const;  // empty: all. Throws on an unknown name

  // What was assigned to parameters and to .grad since the last step moves into the shards. `who`: for messages. Throws before anything
  // changes while the model is running, and where something does not fit.
  void take_over_assigned(const char* who);
  GradientCheck& gradient_check() { return gradient_check_; }

  // All ranks' `part` (S) as one tensor (N·S): the group's shard or something as large. All ranks must call; where the group is whole
  // already, it is `part` itself.
  at::Tensor gather_flat(const FlatGroup& group, const at::Tensor& part, const char* purpose);

  // Further parameters that are whole on every rank, into a model that exists; values come from rank 0. All ranks must call, between
  // steps, with the same. REQUIRES: `planned` has one unit with replicated groups only; check_can_be_sharded of every tensor.
  void add_replicas(const PlannedModel& planned);

  // Gives the handles plain, whole parameters (and gradients) back. All ranks must call. The model must not be used afterwards.
  void unshard_for_good();

  // What a kernel gets instead of the user's handle. REQUIRES: computing(), access hook off.
  at::Tensor alias_of(ShardedParameter& parameter);
  // What a kernel gets for a handle met in backward while the model rests: somebody's own Function has saved it. With gradients
  // on (a graph of the backward is wanted) it leads to the parameter's sink.
  at::Tensor saved_handle(ShardedParameter& parameter);
  void receive_gradient(ShardedParameter& parameter, const at::Tensor& gradient);
  void shard_was_written(Unit& unit);  // what is resident of it is out of date
  bool writes_allowed() const { return write_through_ || writable_summons_ > 0; }
  void keep_written(FlatGroup& group, const at::Tensor& written);  // REQUIRES: writes_allowed(), the unit pinned

 private:
  class BackwardGuard;

  ShardedModel(Plan plan, std::shared_ptr<comm::Collectives> collectives);
  void build_units(const PlannedModel& planned);
  void fill_shards(const PlannedModel& planned, bool sync_from_rank_0);
  void fill_shard(FlatGroup& group, bool from_rank_0);
  void attach_handles();
  void attach_handles(Unit& unit, FlatGroup& group);
  void check_adoptable() const;
  void adopt_assigned();
  void drop_unused_aliases();
  void drop_aliases_with_graph();
  void enter_backward();  // does nothing when one is under way
  void finish_backward();
  void fail_backward() noexcept;

  mutable std::mutex mutex_;
  Plan plan_;
  CountedCollectives collectives_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Reducer> reducer_;
  GradientCheck gradient_check_;
  bool write_through_ = false;
  std::optional<c10::ScalarType> param_dtype_;
  bool casts_inputs_ = true;
  std::atomic<bool> syncs_gradients_{true};
  std::atomic<int> brackets_{0};
  std::atomic<int> writable_summons_{0};
  bool in_backward_ = false;
  bool graph_is_kept_ = false;  // by the backward under way (retain_graph)
  bool backward_ended_in_bracket_ = false;
};

}  // namespace fsdp
