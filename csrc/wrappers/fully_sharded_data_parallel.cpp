#include <fsdp/fully_sharded_data_parallel.h>

#include "plan/planner.h"
#include "runtime/access_key.h"
#include "runtime/grad_norm.h"
#include "runtime/registry.h"
#include "runtime/sharded_model.h"
#include "wrappers/wrap_model.h"

namespace fsdp {

ComputingBracket::ComputingBracket(std::shared_ptr<ShardedModel> model) : model_(std::move(model)) { model_->enter_computing(); }
ComputingBracket::~ComputingBracket() { model_->leave_computing(); }

FullParameters::FullParameters(std::shared_ptr<ShardedModel> model, const SummonOptions& options)
    : bracket_(model), model_(std::move(model)), units_(model_->units_named(options.units)), write_back_(options.write_back) {
  model_->summon(units_, write_back_);
}
FullParameters::~FullParameters() { model_->dismiss(units_, write_back_); }

FullyShardedBase::FullyShardedBase(std::shared_ptr<torch::nn::Module> module, const ProcessGroup& group, const FsdpOptions& options)
    : Module("FullyShardedDataParallel") {
  TORCH_CHECK(module, "rank ", group.rank(),
              ": FullyShardedDataParallel got no module (an empty holder or a null pointer); construct it first");
  WrappedModel wrapped = wrap_model(*module, group, options);
  model_ = std::move(wrapped.model);
  output_dtype_ = options.mixed_precision.output_dtype;
  for (auto& [name, tensor] : wrapped.parameters) parameters_by_name_.insert(std::move(name), std::move(tensor));
  for (auto& [name, tensor] : wrapped.buffers) buffers_by_name_.insert(std::move(name), std::move(tensor));
  register_module("module", std::move(module));
}

FullyShardedBase::~FullyShardedBase() = default;

const std::shared_ptr<ShardedModel>& FullyShardedBase::model() const {
  TORCH_CHECK(model_,
              "this FullyShardedDataParallel is empty: it was unwrapped or moved from. Use the module that unwrap() returned, or the "
              "wrapper moved to");
  return model_;
}

const std::shared_ptr<ShardedModel>& FullyShardedBase::model_to_run() const {
  if (!model()->computing()) check_still_wrapped(*children().front(), parameters_by_name_, model()->rank());
  return model();
}

void FullyShardedBase::unwrap_parameters() {
  model()->unshard_for_good();
  model_.reset();
}

ClipResult FullyShardedBase::clip_grad_norm_(double max_norm, double norm_type) {
  return clip_gradients(*model(), parameters(), max_norm, norm_type);
}
void FullyShardedBase::clip_grad_value_(double clip_value) { clip_gradient_values(*model(), parameters(), clip_value); }
NoSync::NoSync(std::shared_ptr<ShardedModel> model) : model_(std::move(model)), before_(model_->set_syncs_gradients(false)) {}
NoSync::~NoSync() { model_->set_syncs_gradients(before_); }

NoSync FullyShardedBase::no_sync() { return NoSync(model()); }
void FullyShardedBase::set_gradient_divisor(double divisor) { model()->set_gradient_divisor(divisor); }
void FullyShardedBase::zero_grad(bool set_to_none) {
  Module::zero_grad(set_to_none);
  if (model_) model_->drop_held_gradients();
}

FullParameters FullyShardedBase::summon_full_params(const SummonOptions& options) { return FullParameters(model_to_run(), options); }
const Plan& FullyShardedBase::plan() const { return model()->plan(); }
Stats FullyShardedBase::stats() const { return model()->stats(); }

std::shared_ptr<ShardedModel> detail::sharded_model(const FullyShardedBase& model) { return model.model(); }

void detail::add_unsharded(FullyShardedBase& model, const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
  ModuleTree tree;
  tree.nodes.emplace_back();
  for (const auto& [name, tensor] : parameters) {
    check_can_be_sharded(name, tensor, model.model()->rank());
    tree.parameters.push_back({tensor, {{name, {0}}}, false});
    tree.nodes.front().parameters.push_back(static_cast<int>(tree.parameters.size()) - 1);
  }
  model.model()->add_replicas(make_plan(tree, {true}, model.model()->world_size(), {.unsharded = [](std::string_view) { return true; }}));
  for (const auto& [name, tensor] : parameters) model.parameters_by_name_.insert(name, tensor);
}

at::Tensor detail::as_output(at::Tensor result, const std::optional<c10::ScalarType>& dtype) {
  if (!result.defined()) return result;
  if (const auto tracked = registry::find(result);
      tracked && tracked->kind == TrackedTensor::Kind::PARAMETER && tracked->model->computing()) {
    WithoutAccessHook no_hook;
    result = tracked->model->alias_of(*tracked->parameter);
  }
  return dtype && result.is_floating_point() ? result.to(*dtype) : result;
}

std::vector<at::Tensor> FullyShardedBase::parameters() const { return parameters_by_name_.values(); }
torch::OrderedDict<std::string, at::Tensor> FullyShardedBase::named_parameters() const { return parameters_by_name_; }
std::vector<at::Tensor> FullyShardedBase::buffers() const { return buffers_by_name_.values(); }
torch::OrderedDict<std::string, at::Tensor> FullyShardedBase::named_buffers() const { return buffers_by_name_; }

void FullyShardedBase::to(torch::Device, torch::Dtype, bool) {
  TORCH_CHECK(false, "FullyShardedDataParallel::to would convert one rank's slices; convert the module before wrapping it");
}
void FullyShardedBase::to(torch::Dtype dtype, bool non_blocking) { to(torch::kCPU, dtype, non_blocking); }
void FullyShardedBase::to(torch::Device device, bool non_blocking) { to(device, torch::kFloat, non_blocking); }

void FullyShardedBase::save(torch::serialize::OutputArchive&) const {
  TORCH_CHECK(false,
              "saving a FullyShardedDataParallel would write one rank's slices. On all ranks: fsdp::save_weights(model, \"folder\") writes "
              "the whole model as safetensors, fsdp::save_checkpoint(\"folder\", step, model, optimizer) a run to go on with");
}
void FullyShardedBase::load(torch::serialize::InputArchive&) {
  TORCH_CHECK(
      false,
      "loading into a FullyShardedDataParallel would overwrite slices with whole parameters; load into the module before wrapping it, or "
      "use fsdp::load_weights or fsdp::load_checkpoint on all ranks");
}
std::shared_ptr<torch::nn::Module> FullyShardedBase::clone(const std::optional<torch::Device>&) const {
  TORCH_CHECK(false, "cloning a FullyShardedDataParallel would copy one rank's slices; clone the module before wrapping it");
}

}  // namespace fsdp
