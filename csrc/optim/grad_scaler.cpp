#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <fsdp/grad_scaler.h>

#include <utility>

#include "runtime/access_key.h"
#include "runtime/flat_views.h"

namespace fsdp {
namespace {

// What has been done since the last update(); each call enters the next.
enum class Stage { READY, UNSCALED, STEPPED };

void check(const GradScalerOptions& o) {
  TORCH_CHECK(o.min_scale > 0 && o.init_scale >= o.min_scale,
              "GradScaler: expected init_scale of at least min_scale and both above 0, got ", o.init_scale, " and ", o.min_scale);
  TORCH_CHECK(o.growth_factor > 1, "GradScaler: growth_factor must be above 1, got ", o.growth_factor);
  TORCH_CHECK(o.backoff_factor > 0 && o.backoff_factor < 1, "GradScaler: backoff_factor must be above 0 and below 1, got ",
              o.backoff_factor);
  TORCH_CHECK(o.growth_interval >= 1 && o.max_skips_in_a_row >= 0,
              "GradScaler: expected growth_interval of at least 1 and max_skips_in_a_row of at least 0, got ", o.growth_interval, " and ",
              o.max_skips_in_a_row);
}

}  // namespace

class GradScaler::Impl {
 public:
  Impl(std::shared_ptr<ShardedModel> model, const GradScalerOptions& options) : options_(options), views_(std::move(model)) {
    check(options_);
    set(options_.init_scale, 0);
  }

  at::Tensor scale(const at::Tensor& loss) const {
    TORCH_CHECK(stage_ != Stage::STEPPED, "GradScaler::scale() after step() without update(): call update() once at the end of each step");
    return options_.enabled && options_.scale_loss ? loss * scale_ : loss;
  }

  void unscale() {
    if (!options_.enabled) return;
    TORCH_CHECK(stage_ == Stage::READY,
                "GradScaler::unscale_() was called already since the last update(), or after step(); gradients are "
                "divided by the scale once");
    views_.settle("GradScaler::unscale_()");
    c10::AutoGradMode no_grad(false);
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    WithoutAccessHook no_hook;
    for (const auto& group : views_.groups())
      for (const auto& parameter : group.parameters)
        TORCH_CHECK(
            !parameter.has_gradient() || group.gradient.scalar_type() != at::kHalf, "rank ", views_.rank(),
            ": GradScaler::unscale_(): parameter '", parameter.name,
            "' is stored in fp16, and so is its gradient, which would vanish when divided by the scale. Build the model in fp32 and "
            "compute in fp16");
    auto found = at::zeros({1}, device());
    const auto inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
    for (const auto& group : views_.groups()) {
      const auto with_gradient = [&](size_t p) { return group.parameters[p].has_gradient(); };
      std::vector<at::Tensor> gradients;
      for (const auto& run : stretches_of(group, with_gradient)) {
        const auto gradient = group.gradient.narrow(0, run.begin, run.length);
        gradients.push_back(gradient.is_complex() ? at::view_as_real(gradient) : gradient);
      }
      if (!gradients.empty()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
    }
    views_.found_non_finite(std::move(found));
    stage_ = Stage::UNSCALED;
  }

  bool may_step() {
    if (!options_.enabled) return true;
    if (stage_ == Stage::READY) unscale();
    stage_ = Stage::STEPPED;
    return !views_.any_found_non_finite("GradScaler::step()");
  }

  void update() {
    if (!options_.enabled) return;
    TORCH_CHECK(stage_ != Stage::READY, "GradScaler::update() without step() or unscale_() since the last one: nothing was checked");
    const bool skipped = views_.any_found_non_finite("GradScaler::update()");
    stage_ = Stage::READY;
    skipped_ += skipped;
    in_a_row_ = skipped ? in_a_row_ + 1 : 0;
    const char* remedy =
        ". Gradients are inf or NaN whatever the scale: look for the cause in the loss, the data or the learning rate; the "
        "parameters are those of the last finite step";
    TORCH_CHECK(in_a_row_ <= options_.max_skips_in_a_row, "GradScaler: ", in_a_row_,
                " steps in a row were skipped on all ranks, more than "
                "max_skips_in_a_row = ",
                options_.max_skips_in_a_row, remedy);
    if (!options_.scale_loss) return;
    TORCH_CHECK(!skipped || get_scale() * options_.backoff_factor >= options_.min_scale,
                "GradScaler: the step was skipped on all ranks at scale ", get_scale(),
                ", and a smaller one would be below min_scale = ", options_.min_scale, remedy);
    at::_amp_update_scale_(scale_, growth_tracker_, at::full({}, skipped ? 1.0 : 0.0, device()), options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
  }

  void set(double scale, int64_t growth_tracker) {
    scale_ = at::full({}, options_.enabled && options_.scale_loss ? scale : 1.0, device());
    growth_tracker_ = at::full({}, growth_tracker, device().dtype(at::kInt));
  }
  double get_scale() const { return scale_.item<double>(); }
  const GradScalerOptions& options() const { return options_; }
  int64_t skipped() const { return skipped_; }

  GradScalerState state() const { return {get_scale(), growth_tracker_.item<int64_t>(), skipped_, in_a_row_}; }
  void load(const GradScalerState& state) {
    TORCH_CHECK(state.scale > 0 && state.growth_tracker >= 0,
                "GradScaler::load_state(): expected a scale above 0 and a growth_tracker of at "
                "least 0, got ",
                state.scale, " and ", state.growth_tracker);
    set(state.scale, state.growth_tracker);
    skipped_ = state.skipped_steps;
    in_a_row_ = state.skips_in_a_row;
  }

 private:
  at::TensorOptions device() const { return at::dtype(at::kFloat).device(views_.groups().front().shard.device()); }

  const GradScalerOptions options_;
  FlatViews views_;
  Stage stage_ = Stage::READY;
  at::Tensor scale_;           // () float; 1 where nothing is scaled
  at::Tensor growth_tracker_;  // () int
  int64_t skipped_ = 0, in_a_row_ = 0;
};

GradScaler::GradScaler(std::shared_ptr<ShardedModel> model, const GradScalerOptions& options)
    : impl_(std::make_unique<Impl>(std::move(model), options)) {}
GradScaler::~GradScaler() = default;
GradScaler::GradScaler(GradScaler&&) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&&) noexcept = default;

at::Tensor GradScaler::scale(const at::Tensor& loss) const { return impl_->scale(loss); }
void GradScaler::unscale_() { impl_->unscale(); }
bool GradScaler::may_step() { return impl_->may_step(); }
void GradScaler::update() { impl_->update(); }
double GradScaler::get_scale() const { return impl_->get_scale(); }
bool GradScaler::is_enabled() const { return impl_->options().enabled; }
int64_t GradScaler::skipped_steps() const { return impl_->skipped(); }
const GradScalerOptions& GradScaler::options() const { return impl_->options(); }
GradScalerState GradScaler::state() const { return impl_->state(); }
void GradScaler::load_state(const GradScalerState& state) { impl_->load(state); }

}  // namespace fsdp
