// What sweep.py needs of the library, as operators of the namespace fsdp_test: torch.ops.load_library makes them callable without a
// line of Python's own interface. One model at a time, used by one thread.
//
//     shard(tensors)      each tensor becomes the only parameter of a unit of its own; replaces the model before
//     enter(), leave()    the bracket in which the tensors have their full shape
//     returned(tensor)    what a wrapper gives its caller for a tensor that the model returns
//     gradient(index)     of the full shape, from the last backward; None where .grad is undefined
//     drop()              destroys the model
//     strict(on)          frees and overwrites every unit after each operator of the process
//     gathers(), frees()  since the model was sharded: units gathered, and units freed by strict(true)
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <fsdp/fsdp.h>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string_view>

#include "operators/twin_collectives.h"
#include "runtime/access_key.h"
#include "wrappers/wrap_model.h"

namespace fsdp::testing {
namespace {

struct Swept {
  std::shared_ptr<TwinCollectives> twin = std::make_shared<TwinCollectives>();
  std::shared_ptr<torch::nn::Module> root;
  std::shared_ptr<ShardedModel> model;
  std::atomic<int64_t> frees{0};
};

std::unique_ptr<Swept> swept;
at::CallbackHandle strict_callback = at::INVALID_CALLBACK_HANDLE;

Swept& current() {
  TORCH_CHECK(swept, "no model: call shard first");
  return *swept;
}

// Overwritten with NaNs (for integers -1) before it goes, so that whoever kept a pointer computes with that and not, by luck, with
// values that still lie there.
void free_and_poison(Swept& swept) {
  for (const auto& unit : swept.model->units()) {
    if (unit->state == BufferState::ABSENT || unit->pins) continue;
    for (const auto& group : unit->groups)
      if (const auto bytes = group->unsharded.storage().nbytes()) std::memset(group->unsharded.storage().mutable_data(), 0xff, bytes);
    ++swept.frees;
    swept.model->shard_was_written(*unit);
  }
}

void after_operator(const at::RecordFunction& record, at::ObserverContext* /*context*/) {
  // The runtime's own calls, made under the model's lock.
  if (!swept || !swept->model || c10::impl::tls_is_dispatch_key_excluded(kAccessKey)) return;
  if (std::string_view(record.name()).starts_with("fsdp")) return;
  free_and_poison(*swept);
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& /*record*/) { return nullptr; }

void drop() { swept.reset(); }

void shard(const std::vector<at::Tensor>& tensors) {
  drop();
  auto made = std::make_unique<Swept>();
  made->root = std::make_shared<torch::nn::Module>("Swept");
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto holder = std::make_shared<torch::nn::Module>("Holder");
    holder->register_parameter("value", tensors[i], tensors[i].requires_grad());
    made->root->register_module("t" + std::to_string(i), std::move(holder));
  }
  // Advice about how well such a model is cut is of no use here.
  struct Quiet final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  } quiet;
  const c10::WarningUtils::WarningHandlerGuard no_warnings(&quiet);
  const auto every_module = lambda_auto_wrap_policy([](const torch::nn::Module&) { return true; });
  made->model = wrap_model(*made->root, ProcessGroup(made->twin), {.auto_wrap_policy = every_module}).model;
  swept = std::move(made);
}

void enter() { current().model->enter_computing(); }
void leave() { current().model->leave_computing(); }

std::optional<at::Tensor> gradient(int64_t index) {
  WithoutAccessHook no_hook;
  const at::NoGradGuard no_grad;
  auto& model = *current().model;
  const auto& unit = *model.units_named({"t" + std::to_string(index)}).front();
  const auto& group = *unit.groups.front();
  const auto& parameter = group.parameters.front();
  const auto& own = parameter.handle.grad();
  if (!own.defined()) return std::nullopt;
  auto flat = at::zeros({group.layout.numel(0)}, own.options());
  if (flat.numel()) {
    const auto summed = current().twin->reduced(unit.title);
    TORCH_CHECK(summed.defined(), parameter.name, " has a gradient that was never reduced");
    for (const auto& run : group.layout.gradient_runs(0))
      flat.narrow(0, run.begin_in_parameter, run.length).copy_(summed.narrow(0, run.begin_in_gradient, run.length));
  }
  const auto part = group.layout.slice(0, group.rank);
  const auto expected = flat.narrow(0, part.begin_in_parameter, part.length);
  TORCH_CHECK(at::allclose(own, expected, 0, 0, /*equal_nan=*/true), ".grad of ", parameter.name,
              " is not this rank's part of what was reduced");
  return flat.as_strided(parameter.full_shape, parameter.full_strides);
}

void strict(bool on) {
  if (on == (strict_callback != at::INVALID_CALLBACK_HANDLE)) return;
  if (on) {
    strict_callback =
        at::addGlobalCallback(at::RecordFunctionCallback(&before_operator, &after_operator).scopes({at::RecordScope::FUNCTION}));
  } else {
    at::removeCallback(std::exchange(strict_callback, at::INVALID_CALLBACK_HANDLE));
  }
}

int64_t gathers() { return current().model->stats().collectives.all_gather.calls; }
int64_t frees() { return current().frees; }

}  // namespace
}  // namespace fsdp::testing

TORCH_LIBRARY(fsdp_test, m) {
  using namespace fsdp::testing;
  m.def("shard(Tensor[] tensors) -> ()", [](std::vector<at::Tensor> tensors) { shard(tensors); });
  m.def("enter() -> ()", &enter);
  m.def("leave() -> ()", &leave);
  m.def("returned(Tensor tensor) -> Tensor", [](const at::Tensor& tensor) { return fsdp::detail::as_output(tensor, std::nullopt); });
  m.def("gradient(int index) -> Tensor?", &gradient);
  m.def("drop() -> ()", &drop);
  m.def("strict(bool on) -> ()", &strict);
  m.def("gathers() -> int", &gathers);
  m.def("frees() -> int", &frees);
}
