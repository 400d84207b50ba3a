/// Loss scaling for fp16, and steps that wait for finite gradients in any dtype.
///
///     fsdp::GradScaler scaler(model);
///     scaler.scale(loss).backward();
///     scaler.unscale_();                        // only where gradients are looked at before the step
///     model.clip_grad_norm_(1.0);
///     if (scaler.step(optimizer)) ++steps;      // false: skipped, on all ranks alike
///     scaler.update();
///     optimizer.zero_grad();
///
/// Names, defaults and arithmetic are those of torch.amp.GradScaler. The gradients are the model's, not an optimizer's: unscale_ takes
/// none, and one inf anywhere makes every optimizer stepped before the next update() skip. Whether any rank has found one is agreed on by
/// one all-reduce in step(), or by that of clip_grad_norm_ where it is called in between.
///
/// Thread safety: as FullyShardedDataParallel. All ranks must make the same calls.
#pragma once

#include <fsdp/export.h>
#include <fsdp/fully_sharded_data_parallel.h>

#include <cstdint>
#include <memory>

namespace fsdp {

struct GradScalerOptions {
  double init_scale = 65536;       ///< what the loss is multiplied by; smaller: more gradients vanish, fewer overflow
  double growth_factor = 2;        ///< above 1
  double backoff_factor = 0.5;     ///< above 0, below 1
  int64_t growth_interval = 2000;  ///< finite steps in a row until the scale grows
  bool enabled = true;             ///< false: nothing is scaled, checked or skipped

  /// false: gradients are checked and steps skipped, but nothing is scaled: for bf16, where a scale is of no use and one inf would still
  /// ruin the moments.
  bool scale_loss = true;

  /// update() throws instead of going below: a run that overflows even so does not recover by skipping.
  double min_scale = 1;
  /// update() throws at the next skipped step after so many in a row, scaled or not.
  int64_t max_skips_in_a_row = 100;
};

/// What a run needs to go on as it was; alike on all ranks.
struct GradScalerState {
  double scale = 1;
  int64_t growth_tracker = 0;  ///< finite steps since the scale changed
  int64_t skipped_steps = 0;   ///< in all
  int64_t skips_in_a_row = 0;
};

class FSDP_API GradScaler {
 public:
  /// Not collective. Throws c10::Error on options out of range.
  explicit GradScaler(const FullyShardedBase& model, const GradScalerOptions& options = {})
      : GradScaler(detail::sharded_model(model), options) {}
  ~GradScaler();
  GradScaler(GradScaler&&) noexcept;
  GradScaler& operator=(GradScaler&&) noexcept;

  /// loss times the scale, for backward. Throws between step() and update().
  at::Tensor scale(const at::Tensor& loss) const;

  /// Divides the gradients by the scale and looks for inf and NaN; once between two calls of update(). Throws, naming the parameter, where
  /// one is stored in fp16: its gradient would vanish (keep an fp32 master).
  void unscale_();

  /// Steps the optimizer (anything with a step()), unless a gradient on any rank is inf or NaN; returns whether it did. Unscales first
  /// where unscale_() has not been called.
  template <class Optimizer>
  bool step(Optimizer& optimizer) {
    if (!may_step()) return false;
    optimizer.step();
    return true;
  }

  /// Ends the step: the scale shrinks where a step was skipped, grows after growth_interval others, and the next unscale_() is free.
  /// Throws on all ranks, the scale unchanged, at the floor of GradScalerOptions.
  void update();

  double get_scale() const;
  bool is_enabled() const;
  int64_t skipped_steps() const;
  const GradScalerOptions& options() const;

  GradScalerState state() const;
  void load_state(const GradScalerState& state);

 private:
  class Impl;
  GradScaler(std::shared_ptr<ShardedModel> model, const GradScalerOptions& options);
  bool may_step();
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
