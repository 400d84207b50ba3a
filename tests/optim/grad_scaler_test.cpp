// fsdp::GradScaler: all ranks skip the same steps, and a skipped step leaves no trace.

#include <fsdp/fsdp.h>

#include <limits>

#include "support/expect_contains.h"
#include "support/given_gradients.h"
#include "support/models.h"
#include "support/rank_part.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
using torch::Tensor;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
using Bags = fsdp::FullyShardedDataParallel<BagsImpl>;

Bags wrap(const fsdp::ProcessGroup& group, torch::Dtype of_second = torch::kFloat) {
  return Bags(std::make_shared<BagsImpl>(of_second), group, {.auto_wrap_policy = one_unit_per_bag()});
}

void backward(Bags& model, const fsdp::GradScaler& scaler, const fsdp::ProcessGroup& group, torch::Dtype of_second = torch::kFloat) {
  model.zero_grad();
  scaler.scale(model(random_gradients(group.rank(), of_second))).backward();
}

// Everything a step may change on this rank.
std::vector<Tensor> memory_of(const Bags& model, const fsdp::AdamW& optimizer) {
  std::vector<Tensor> memory;
  for (const auto& parameter : model.parameters()) memory.push_back(rank_part(parameter));
  for (const auto& state : optimizer.state())
    for (const auto& tensor : {state.exp_avg, state.exp_avg_sq, torch::full({1}, state.step)}) memory.push_back(tensor.clone());
  return memory;
}

bool equal(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](const Tensor& x, const Tensor& y) { return torch::equal(x, y); });
}

// The same random choices on all ranks; the chosen rank writes inf, -inf or NaN into its part of the chosen gradient.
void inject(fsdp::ProcessGroup& group, int injections) {
  Bags model(std::make_shared<BagsImpl>(torch::kBFloat16), group,
             {.auto_wrap_policy = one_unit_per_bag(), .unsharded = fsdp::name_contains("own")});
  fsdp::AdamW optimizer(model, {.lr = 1e-2});
  fsdp::GradScaler scaler(model, {.init_scale = 1024, .growth_interval = 3, .min_scale = std::pow(2.0, -30), .max_skips_in_a_row = 1000});
  torch::Generator choices = at::detail::createCPUGenerator(99);
  const auto choose = [&](int64_t below) { return torch::randint(below, {1}, choices).item<int64_t>(); };
  const auto parameters = model.parameters();
  double scale = 1024;
  int64_t finite_in_a_row = 0, skipped = 0, stepped = 0;
  for (int done = 0, step = 0; done < injections; ++step) {
    const bool injects = choose(3) != 0;
    const auto rank = choose(group.world_size());
    const auto parameter = parameters[choose(static_cast<int64_t>(parameters.size()))];
    const double value = std::array{kInf, -kInf, std::nan("")}[choose(3)];
    const bool clips = choose(2), unscales = clips || choose(2);

    backward(model, scaler, group, torch::kBFloat16);
    const bool is_replica = parameter.is_same(model.named_parameters()["own"]);  // whose gradient is alike on all ranks
    const bool wrote = injects && (group.rank() == rank || is_replica) && put_into_gradient(parameter, value);
    bool expect_skip = false;  // an empty slice takes no injection
    if (injects)
      for (const auto& answer : group.collectives()->exchange("injection", wrote ? "1" : "0")) expect_skip = expect_skip || answer == "1";
    const auto before = memory_of(model, optimizer);
    if (unscales) scaler.unscale_();
    if (clips) EXPECT(std::isfinite(model.clip_grad_norm_(1.0).norm) == !expect_skip, "step " << step << ": the norm");
    const bool did_step = scaler.step(optimizer);
    const auto where = c10::str("step ", step, ", ", value, " in rank ", rank, ", clipped: ", clips, ": ");
    EXPECT(did_step == !expect_skip, where << (did_step ? "stepped" : "skipped"));
    EXPECT(equal(memory_of(model, optimizer), before) == expect_skip, where << "parameters and moments");
    scaler.update();

    finite_in_a_row = expect_skip ? 0 : finite_in_a_row + 1;
    if (expect_skip) scale /= 2;
    if (finite_in_a_row == 3) {
      scale *= 2;
      finite_in_a_row = 0;
    }
    EXPECT(scaler.get_scale() == scale, where << "scale " << scaler.get_scale() << ", expected " << scale);
    if (scale < std::pow(2.0, -20) || scale > std::pow(2.0, 40)) {  // before the scale itself makes gradients vanish or overflow
      scaler.load_state({.scale = 1024, .skipped_steps = scaler.skipped_steps()});
      scale = 1024;
      finite_in_a_row = 0;
    }
    skipped += expect_skip;
    stepped += !expect_skip;
    done += expect_skip;
  }
  EXPECT(scaler.skipped_steps() == skipped && skipped == injections && stepped > injections / 4,
         skipped << " skipped, " << stepped << " made");
}

}  // namespace

RANKS_TEST("100 random inf and NaN on one rank: all ranks skip the same steps, bit for bit", "[optim][scaler]", 1, 2, 3, 4) {
  inject(group, 100);
}

RANK_BODY("1,000 random inf and NaN") { inject(group, 1000); }
TEST_CASE("1,000 random inf and NaN on one rank: all ranks skip the same steps, bit for bit", "[optim][scaler][stress]") {
  for (const int world_size : {2, 3, 4}) run_on_pool(world_size, "1,000 random inf and NaN", std::chrono::minutes(10));
}

// Skipped steps said nothing while schedules went on; or nothing was checked, and one inf stayed in the moments for ever; or gradients
// were divided by a scale that the loss had never got.
RANKS_TEST("C6: bf16 without a scale: an inf is skipped, counted and leaves the moments; switched off, nothing changes a bit",
           "[cases][scaler][quick]", 1, 2, 3, 4) {
  auto model = wrap(group, torch::kBFloat16), off = wrap(group, torch::kBFloat16), bare = wrap(group, torch::kBFloat16);
  fsdp::AdamW optimizer(model), off_optimizer(off), bare_optimizer(bare);
  fsdp::GradScaler scaler(model, {.scale_loss = false}), off_scaler(off, {.enabled = false});
  for (int step = 0; step < 3; ++step) {
    backward(model, scaler, group, torch::kBFloat16);
    EXPECT(scaler.step(optimizer), "finite gradients");
    scaler.update();
    backward(off, off_scaler, group, torch::kBFloat16);
    off_scaler.unscale_();
    EXPECT(off_scaler.step(off_optimizer), "a scaler that is off never skips");
    off_scaler.update();
    bare.zero_grad();
    bare(random_gradients(group.rank(), torch::kBFloat16)).backward();
    bare_optimizer.step();
  }
  EXPECT(equal(memory_of(off, off_optimizer), memory_of(bare, bare_optimizer)), "switched off, yet other numbers");
  EXPECT(equal(memory_of(model, optimizer), memory_of(bare, bare_optimizer)), "a check that changes numbers");
  EXPECT(scaler.get_scale() == 1 && off_scaler.get_scale() == 1 && !off_scaler.is_enabled(), scaler.get_scale());

  const auto before = memory_of(model, optimizer);
  backward(model, scaler, group, torch::kBFloat16);
  if (group.rank() == 0) EXPECT(put_into_gradient(model.named_parameters()["second.p0"], kInf), "no element on rank 0");
  EXPECT(!scaler.step(optimizer), "an inf was stepped with");
  scaler.update();
  EXPECT(scaler.skipped_steps() == 1, scaler.skipped_steps());
  EXPECT(equal(memory_of(model, optimizer), before), "the skipped step left a trace");
}

RANKS_TEST("scaling by powers of two changes no bit of fp32 training, with torch::optim too", "[optim][scaler][quick]", 1, 2, 3) {
  torch::manual_seed(5);
  Mlp net, other;
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  {
    torch::manual_seed(5);
    Mlp same;
    other = same;
  }
  fsdp::FullyShardedDataParallel unscaled(other, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  torch::optim::SGD optimizer(model.parameters(), 0.1), plain_optimizer(unscaled.parameters(), 0.1);
  fsdp::GradScaler scaler(model, {.growth_interval = 2});
  EXPECT(scaler.get_scale() == 65536, scaler.get_scale());
  for (int step = 0; step < 4; ++step) {
    torch::manual_seed(10 * step + group.rank());
    const auto x = torch::randn({4, 6});
    scaler.scale(model(x).square().mean()).backward();
    EXPECT(scaler.step(optimizer), "step " << step);
    scaler.update();
    optimizer.zero_grad();
    unscaled(x).square().mean().backward();
    plain_optimizer.step();
    plain_optimizer.zero_grad();
  }
  EXPECT(scaler.get_scale() == 4 * 65536, "two growths: " << scaler.get_scale());
  for (size_t i = 0; i < model.parameters().size(); ++i)
    EXPECT(torch::equal(rank_part(model.parameters()[i]), rank_part(unscaled.parameters()[i])), "parameter " << i);
}

RANKS_TEST("whether gradients are finite is agreed by one reduction, clipping's where there is one", "[optim][scaler][counts][quick]", 1, 2,
           3) {
  auto recorded = record(group);
  auto model = wrap(recorded.group);
  fsdp::AdamW optimizer(model);
  fsdp::GradScaler scaler(model);
  const bool alone = group.world_size() == 1;
  for (const bool unscales : {false, true}) {
    backward(model, scaler, group);
    recorded.log->clear();
    if (unscales) scaler.unscale_();
    scaler.step(optimizer);
    scaler.update();
    EXPECT(recorded.log->text() == (alone ? "" : "all_reduce GradScaler::step()\n"), recorded.log->text());
  }
  backward(model, scaler, group);
  recorded.log->clear();
  scaler.unscale_();
  model.clip_grad_norm_(1.0);
  scaler.step(optimizer);
  scaler.update();
  EXPECT(recorded.log->text() == (alone ? "" : "all_reduce clip_grad_norm_\n"), recorded.log->text());
}

RANKS_TEST("a scaler at its floor throws on all ranks, with and without a scale", "[optim][scaler][errors][quick]", 1, 2, 3) {
  auto model = wrap(group);
  fsdp::AdamW optimizer(model);
  const auto skip = [&](fsdp::GradScaler& scaler) {
    backward(model, scaler, group);
    if (group.rank() == 0) put_into_gradient(model.named_parameters()["own"], kInf);
    EXPECT(!scaler.step(optimizer), "stepped");
  };
  fsdp::GradScaler scaler(model, {.init_scale = 4});
  for (int i = 0; i < 2; ++i) {
    skip(scaler);
    scaler.update();
  }
  skip(scaler);
  expect_contains(error_of([&] { scaler.update(); }), {"skipped on all ranks at scale 1", "min_scale = 1", "look for the cause"});
  EXPECT(scaler.get_scale() == 1 && scaler.skipped_steps() == 3, scaler.get_scale());
  backward(model, scaler, group);
  EXPECT(scaler.step(optimizer), "a finite step after the error");
  scaler.update();

  fsdp::GradScaler only_checks(model, {.scale_loss = false, .max_skips_in_a_row = 2});
  for (int i = 0; i < 2; ++i) {
    skip(only_checks);
    only_checks.update();
  }
  skip(only_checks);
  expect_contains(error_of([&] { only_checks.update(); }), {"3 steps in a row were skipped on all ranks", "max_skips_in_a_row = 2"});
}

RANKS_TEST("GradScaler names calls at the wrong time and options out of range", "[optim][scaler][errors][quick]", 1, 2) {
  auto model = wrap(group);
  fsdp::AdamW optimizer(model);
  fsdp::GradScaler scaler(model);
  expect_contains(error_of([&] { scaler.update(); }), {"update() without step() or unscale_()"});
  backward(model, scaler, group);
  scaler.unscale_();
  expect_contains(error_of([&] { scaler.unscale_(); }), {"unscale_() was called already"});
  EXPECT(scaler.step(optimizer), "finite");
  expect_contains(error_of([&] { scaler.scale(torch::ones({})); }), {"after step() without update()"});
  scaler.update();

  for (const auto& [options, text] : std::vector<std::pair<fsdp::GradScalerOptions, std::string>>{
           {{.init_scale = 0.5}, "init_scale of at least min_scale"},
           {{.growth_factor = 1}, "growth_factor must be above 1, got 1"},
           {{.backoff_factor = 1}, "backoff_factor must be above 0 and below 1, got 1"},
           {{.growth_interval = 0}, "growth_interval of at least 1"}})
    expect_contains(error_of([&, options = options] { fsdp::GradScaler(model, options); }), {text});
  expect_contains(error_of([&] { scaler.load_state({.scale = 0}); }), {"expected a scale above 0"});

  fsdp::GradScaler restored(model);
  restored.load_state({.scale = 32, .growth_tracker = 1999, .skipped_steps = 7});
  backward(model, restored, group);
  restored.step(optimizer);
  restored.update();
  EXPECT(restored.get_scale() == 64 && restored.skipped_steps() == 7, "goes on where the other stopped: " << restored.get_scale());
  EXPECT(restored.state().growth_tracker == 0, restored.state().growth_tracker);

  auto half = wrap(group, torch::kHalf);
  fsdp::GradScaler of_half(half);
  backward(half, of_half, group, torch::kHalf);
  expect_contains(error_of([&] { of_half.unscale_(); }), {"parameter 'second.p0' is stored in fp16", "compute in fp16"});
}
