// fsdp::AdamW and fsdp::Adam give the numbers of torch::optim's.

#include <ATen/record_function.h>
#include <fsdp/fsdp.h>

#include <string_view>

#include "support/expect_contains.h"
#include "support/given_gradients.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/rank_part.h"
#include "support/ranks.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace optim = torch::optim;

namespace {

using Bags = fsdp::FullyShardedDataParallel<BagsImpl>;
using Names = std::vector<std::string>;

Bags wrap(const fsdp::ProcessGroup& group, torch::Dtype of_second = torch::kFloat, fsdp::ParameterPredicate unsharded = {}) {
  return Bags(std::make_shared<BagsImpl>(of_second), group, {.auto_wrap_policy = one_unit_per_bag(), .unsharded = std::move(unsharded)});
}

bool is_tiny_or_second(std::string_view name) { return name.find("tiny") == 0 || name.find("second") == 0; }

// In odd steps parameters 2, 5, 8... have no gradient on any rank; for a while 'second.p0' is frozen.
bool has_gradient(size_t parameter, int step) { return step % 2 == 0 || parameter % 3 != 2; }
constexpr int kFrozenFrom = 10, kFrozenTo = 20;
constexpr const char* kFrozen = "second.p0";

// Trains `model` and a plain copy with the mean of the ranks' gradients.
template <class Optimizer, class PlainOptimizer>
void train_both(Bags& model, BagsImpl& plain, Optimizer& optimizer, PlainOptimizer& plain_optimizer, const fsdp::ProcessGroup& group,
                int steps, torch::Dtype of_second = torch::kFloat) {
  const auto plain_parameters = plain.named_parameters();
  for (int step = 0; step < steps; ++step) {
    const bool frozen = step >= kFrozenFrom && step < kFrozenTo;
    model.named_parameters()[kFrozen].requires_grad_(!frozen);
    const auto gradients_of = [&](int rank) {
      auto gradients = random_gradients(rank, of_second, step);
      for (size_t i = 0; i < gradients.size(); ++i)
        if (!has_gradient(i, step)) gradients[i].reset();
      return gradients;
    };
    model(gradients_of(group.rank())).backward();
    for (size_t i = 0; i < plain_parameters.size(); ++i) {
      auto& gradient = plain.parameters()[i].mutable_grad();
      gradient.reset();
      if (!has_gradient(i, step) || (frozen && plain_parameters[i].key() == kFrozen)) continue;
      for (int rank = 0; rank < group.world_size(); ++rank) {
        const auto part = gradients_of(rank)[i].to(plain_parameters[i].value().scalar_type()) / group.world_size();
        gradient = rank ? gradient + part : part;
      }
    }
    optimizer.step();
    optimizer.zero_grad();
    plain_optimizer.step();
  }
}

void expect_close_parameters(Bags& model, BagsImpl& plain, double tolerance) {
  auto full = model.summon_full_params();
  torch::NoGradGuard no_grad;
  const auto wanted = plain.named_parameters();
  for (const auto& item : model.named_parameters()) {
    const auto want = wanted[item.key()];
    if (want.numel() == 0) continue;
    const auto wide = want.to(torch::kDouble);
    const double difference = ((item.value().to(torch::kDouble) - wide).abs() / wide.abs().clamp_min(1)).max().item<double>();
    EXPECT(difference <= tolerance, item.key() << " is off by " << difference);
    EXPECT((want - 1).abs().max().item<double>() > 1e-3, item.key() << " has hardly moved: this compares nothing");
  }
}

}  // namespace

RANKS_TEST("AdamW over flat shards is torch::optim::AdamW, with frozen and replicated parts and gradients that come and go", "[optim]", 1,
           2, 3, 4) {
  for (const auto& unsharded : {fsdp::ParameterPredicate(), fsdp::name_contains("p0")}) {
    auto model = wrap(group, torch::kFloat, unsharded);
    BagsImpl plain;
    fsdp::AdamW optimizer(model, {.lr = 1e-2, .weight_decay = 0.1});
    optim::AdamW plain_optimizer(plain.parameters(), optim::AdamWOptions(1e-2).weight_decay(0.1));
    train_both(model, plain, optimizer, plain_optimizer, group, 50);
    expect_close_parameters(model, plain, 1e-6);
    const auto plain_parameters = plain.named_parameters();
    EXPECT(optimizer.state().size() == plain_parameters.size(), optimizer.state().size());
    for (const auto& state : optimizer.state()) {
      auto parameter = plain_parameters[state.name];
      const auto& want = static_cast<const optim::AdamWParamState&>(*plain_optimizer.state().at(parameter.unsafeGetTensorImpl()));
      EXPECT(state.step == want.step(), state.name << " made " << state.step << " steps");
      const auto numel = model.named_parameters()[state.name].numel();
      EXPECT(state.exp_avg.dim() == 1 && state.exp_avg.numel() == numel && state.exp_avg.scalar_type() == torch::kFloat,
             state.name << ": " << state.exp_avg.sizes());
    }
  }
}

// Adapters are stepped all the time beside a frozen base that is gathered once.
RANKS_TEST("a step of replicated parameters leaves what is gathered of a frozen base", "[optim][counts][quick]", 2, 3) {
  auto net = std::make_shared<BagsImpl>();
  const auto trained = [](std::string_view name) { return name.find("own") == 0 || name.find("second.p1") == 0; };
  for (const auto& item : net->named_parameters()) item.value().set_requires_grad(trained(item.key()));
  Bags model(net, group,
             {.sharding_strategy = fsdp::ShardingStrategy::SHARD_GRAD_OP, .auto_wrap_policy = one_unit_per_bag(), .unsharded = trained});
  fsdp::AdamW optimizer(model);
  int64_t gathers = 0;
  for (int step = 0; step < 3; ++step) {
    model(random_gradients(group.rank())).backward();
    optimizer.step();
    optimizer.zero_grad();
    const auto calls = model.stats().collectives.all_gather.calls;
    if (step == 0) gathers = calls;
    EXPECT(gathers > 0 && calls == gathers, "step " << step << ": " << calls << " gathers, " << gathers << " after the first");
  }
}

RANKS_TEST("Adam over flat shards is torch::optim::Adam, its penalty included", "[optim]", 1, 2, 3, 4) {
  auto model = wrap(group);
  BagsImpl plain;
  fsdp::Adam optimizer(model, {.lr = 1e-2, .beta1 = 0.8, .beta2 = 0.99, .eps = 1e-6, .weight_decay = 0.1});
  optim::Adam plain_optimizer(plain.parameters(), optim::AdamOptions(1e-2).betas({0.8, 0.99}).eps(1e-6).weight_decay(0.1));
  train_both(model, plain, optimizer, plain_optimizer, group, 50);
  expect_close_parameters(model, plain, 1e-6);
}

RANKS_TEST("parameter groups have options of their own and follow schedules; what another optimizer has does not move", "[optim][quick]", 1,
           2, 3, 4) {
  auto model = wrap(group);
  BagsImpl plain;
  std::vector<Tensor> decayed, others, foreign;
  for (const auto& item : plain.named_parameters())
    (item.key() == "own" ? foreign : is_tiny_or_second(item.key()) ? others : decayed).push_back(item.value());
  fsdp::AdamW optimizer(model, {.groups = {{is_tiny_or_second, {.lr = 2e-2, .weight_decay = 0}},
                                           {fsdp::name_contains("large"), {.lr = 1e-2, .weight_decay = 0.1}}}});
  EXPECT(optimizer.groups() == 2, optimizer.groups());
  std::vector<optim::OptimizerParamGroup> groups;
  groups.emplace_back(others, std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(2e-2).weight_decay(0)));
  groups.emplace_back(decayed, std::make_unique<optim::AdamWOptions>(optim::AdamWOptions(1e-2).weight_decay(0.1)));
  optim::AdamW plain_optimizer(groups, optim::AdamWOptions(1e-2));
  const fsdp::CosineSchedule schedule{.warmup_steps = 2, .total_steps = 10};
  const auto own = model.named_parameters()["own"];
  const auto own_before = rank_part(own);
  for (int step = 0; step < 10; ++step) {
    optimizer.set_lr_factor(schedule(step));
    static_cast<optim::AdamWOptions&>(plain_optimizer.param_groups()[0].options()).lr(2e-2 * schedule(step));
    static_cast<optim::AdamWOptions&>(plain_optimizer.param_groups()[1].options()).lr(1e-2 * schedule(step));
    model.zero_grad();
    train_both(model, plain, optimizer, plain_optimizer, group, 1);
  }
  EXPECT(torch::equal(rank_part(own), own_before), "a parameter of no group moved");
  EXPECT(own.grad().defined(), "zero_grad() of an optimizer is for its own parameters");
  for (const auto& state : optimizer.state()) EXPECT(state.name != "own", "state for a parameter of no group");
  optim::SGD sgd({own}, 0.5), plain_sgd(foreign, 0.5);
  sgd.step();
  plain_sgd.step();
  expect_close_parameters(model, plain, 1e-6);

  optimizer.options(1).lr = 0;
  optimizer.options(1).weight_decay = 0;
  const auto large = model.named_parameters()["large.p0"];
  const auto before = rank_part(large);
  train_both(model, plain, optimizer, plain_optimizer, group, 1);
  EXPECT(torch::equal(rank_part(large), before), "options changed between steps count");
}

RANKS_TEST("AdamW trains a GPT with tied embedding as torch::optim::AdamW does", "[optim][quick]", 1, 2, 3) {
  torch::manual_seed(3);
  TiedGpt net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>()});
  fsdp::AdamW optimizer(model, {.lr = 1e-3});
  optim::AdamW plain_optimizer(unique_parameters(*plain), 1e-3);
  for (int step = 0; step < 5; ++step) {
    torch::manual_seed(step);  // the same data on all ranks
    const auto ids = torch::randint(0, TiedGptImpl::kVocabulary, {3, TiedGptImpl::kLength + 1});
    const auto loss_of = [&](auto& m) {
      return torch::nn::functional::cross_entropy(m(ids.slice(1, 0, -1)).flatten(0, 1), ids.slice(1, 1).flatten());
    };
    auto loss = loss_of(model), plain_loss = loss_of(plain);
    EXPECT(std::abs(loss.template item<double>() - plain_loss.template item<double>()) < 1e-5, "step " << step);
    loss.backward();
    plain_loss.backward();
    optimizer.step();
    plain_optimizer.step();
    optimizer.zero_grad();
    plain_optimizer.zero_grad();
    EXPECT(model.stats().resident_unsharded_bytes == 0, "kept after the step");
  }
}

// The reference rounds an fp32 step to bf16.
RANKS_TEST("parameters in bf16 have moments in fp32, those in double in double", "[optim][quick]", 1, 2, 3) {
  for (const auto dtype : {torch::kBFloat16, torch::kDouble}) {
    auto model = wrap(group, dtype);
    BagsImpl plain(dtype == torch::kDouble ? torch::kDouble : torch::kFloat);
    fsdp::AdamW optimizer(model, {.lr = 1e-2});
    optim::AdamW adamw(plain.parameters(), optim::AdamWOptions(1e-2));
    struct Rounding {
      optim::AdamW& optimizer;
      std::vector<Tensor> rounded;
      void step() {
        optimizer.step();
        torch::NoGradGuard no_grad;
        for (auto& parameter : rounded) parameter.copy_(parameter.to(torch::kBFloat16));
      }
    } plain_optimizer{adamw, {}};
    if (dtype == torch::kBFloat16)
      for (const auto& item : plain.named_parameters())
        if (item.key().find("second") == 0) plain_optimizer.rounded.push_back(item.value());
    train_both(model, plain, optimizer, plain_optimizer, group, 8, dtype);
    expect_close_parameters(model, plain, dtype == torch::kBFloat16 ? 1.0 / 64 : 1e-6);
    for (const auto& state : optimizer.state())
      if (state.name.find("second") == 0)
        EXPECT(state.exp_avg.scalar_type() == (dtype == torch::kDouble ? torch::kDouble : torch::kFloat), state.exp_avg.dtype());
  }
}

RANKS_TEST("one fused call for each flat group and parameter group, whatever the number of parameters", "[optim][counts][quick]", 1) {
  static int calls = 0;
  auto model = wrap(group);
  fsdp::AdamW together(model);
  fsdp::AdamW apart(model, {.groups = {{fsdp::name_contains("p0"), {}}, {{}, {}}}});
  model(random_gradients(group.rank())).backward();
  const auto calls_of = [](auto& optimizer) {
    calls = 0;
    const auto count = [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
      calls += std::string_view(function.name()) == "aten::_fused_adamw_";
      return nullptr;
    };
    const auto callback = at::addThreadLocalCallback(at::RecordFunctionCallback(count).scopes({at::RecordScope::FUNCTION}));
    optimizer.step();
    at::removeCallback(callback);
    return calls;
  };
  EXPECT(calls_of(together) == 4, calls << " calls for the root unit and three others");
  EXPECT(calls_of(apart) == 1 + 2 + 2 + 1, calls << " calls; two of the units have parameters in both groups");
}

// Version counters: written shards are no secret to graphs made before, on ranks whose slices are empty either.
RANKS_TEST("a backward through what was stepped raises LibTorch's error; a forward after the step sees it", "[optim][quick]", 1, 2, 3, 4) {
  struct SquareImpl : torch::nn::Module {
    SquareImpl() { weight = register_parameter("weight", torch::ones({2})); }
    Tensor forward() { return (weight * weight).sum(); }
    Tensor weight;
  };
  fsdp::FullyShardedDataParallel model(std::make_shared<SquareImpl>(), group);
  fsdp::AdamW optimizer(model, {.lr = 0.25, .weight_decay = 0});
  model.forward().backward();
  auto late = model.forward();  // its unit stays gathered for the backward
  optimizer.step();             // by lr, towards 0
  expect_contains(error_of([&] { late.backward(); }), {"modified by an inplace operation"});
  torch::NoGradGuard no_grad;
  const double value = model.forward().item<double>();
  EXPECT(std::abs(value - 2 * 0.75 * 0.75) < 1e-5, "forward after the step gave " << value);
}

RANKS_TEST("what was assigned to parameters and gradients counts in the step", "[optim][quick]", 1, 2, 3) {
  auto model = wrap(group);
  fsdp::AdamW optimizer(model, {.lr = 0.5, .weight_decay = 0});
  auto own = model.named_parameters()["own"], tiny = model.named_parameters()["tiny.p0"];
  own.mutable_grad() = torch::ones_like(own);
  tiny.mutable_grad() = torch::ones_like(tiny);
  tiny.set_data(torch::full({2}, 3.f));  // the whole value, on all ranks
  optimizer.step();
  {
    auto full = model.summon_full_params();
    torch::NoGradGuard no_grad;
    EXPECT(torch::allclose(own, torch::full({6}, 0.5f)), own.clone());
    EXPECT(torch::allclose(tiny, torch::full({2}, 2.5f)), tiny.clone());
    EXPECT(torch::equal(model.named_parameters()["large.p0"].clone(), torch::ones({7, 5})), "no gradient, no step");
  }
  own.mutable_grad() = torch::ones({9}, torch::kDouble);
  const auto text = error_of([&] { optimizer.step(); });
  expect_contains(text, {".grad of parameter 'own' was assigned", "[9]"});
}

RANKS_TEST("AdamW names what it cannot do, and changes nothing", "[optim][errors][quick]", 1, 2) {
  auto model = wrap(group);
  expect_contains(error_of([&] { fsdp::AdamW(model, {.lr = -1}); }), {"fsdp::AdamW: lr must be at least 0, got -1"});
  expect_contains(error_of([&] { fsdp::Adam(model, {.beta1 = 1}); }), {"fsdp::Adam: beta1 must be at least 0 and below 1, got 1"});
  expect_contains(error_of([&] { fsdp::Adam(model, {.weight_decay = std::nan("")}); }), {"weight_decay must be at least 0, got nan"});
  expect_contains(error_of([&] {
                    fsdp::AdamW(model, {.groups = {{fsdp::name_contains("fc9"), {}}, {{}, {}}}});
                  }),
                  {"parameter group 0 takes none", "named_parameters()"});

  fsdp::AdamW optimizer(model);
  expect_contains(error_of([&] { optimizer.options(1); }), {"there is no parameter group 1; there are 1"});
  expect_contains(error_of([&] { optimizer.set_lr_factor(-0.5); }), {"factor must be at least 0"});
  model(random_gradients(group.rank())).backward();
  const auto before = rank_part(model.parameters().front());
  const auto inside = error_of([&] {
    model.call([&](BagsImpl&) {
      optimizer.step();
      return 0;
    });
  });
  expect_contains(inside, {"fsdp::AdamW::step() while the model is running"});
  EXPECT(torch::equal(rank_part(model.parameters().front()), before) && optimizer.state().empty(), "something changed");
  optimizer.step();
  model.unwrap();
  expect_contains(error_of([&] { optimizer.step(); }), {"is not sharded any more", "unwrapped"});
}

TEST_CASE("schedules climb evenly, fall as they are named, and stay", "[optim][quick]") {
  const fsdp::ConstantSchedule constant{.warmup_steps = 3};
  const fsdp::LinearSchedule linear{.warmup_steps = 3, .total_steps = 11, .final_factor = 0.2};
  const fsdp::CosineSchedule cosine{.warmup_steps = 3, .total_steps = 11, .final_factor = 0.2};
  for (int64_t step = 0; step <= 3; ++step)
    for (const double factor : {constant(step), linear(step), cosine(step)}) CHECK(factor == Catch::Approx((step + 1) / 4.0));
  CHECK(fsdp::ConstantSchedule{}(0) == 1);
  CHECK(constant(1000) == 1);
  CHECK(linear(7) == Catch::Approx(0.6));
  CHECK(cosine(7) == Catch::Approx(0.6));
  CHECK(linear(5) == Catch::Approx(0.8));
  CHECK(cosine(5) == Catch::Approx(0.2 + 0.8 * (1 + std::sqrt(0.5)) / 2));
  for (const int64_t step : {11, 1000})
    for (const double factor : {linear(step), cosine(step)}) CHECK(factor == Catch::Approx(0.2));
  CHECK_THROWS_WITH((fsdp::LinearSchedule{.warmup_steps = 5, .total_steps = 5}(0)),
                    Catch::Matchers::ContainsSubstring("total_steps must be above warmup_steps, got 5 and 5"));
  CHECK_THROWS_WITH(constant(-1), Catch::Matchers::ContainsSubstring("at least 0, got -1"));
}
