// LoRA adapters on models that know nothing of them, plain and wrapped.

#include <fsdp/fsdp.h>

#include "support/expect_contains.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;
namespace lora = fsdp::lora;

namespace {

// Attached adapters change nothing until B does.
void fill_adapters(const std::vector<torch::Tensor>& adapters) {
  torch::NoGradGuard no_grad;
  for (const auto& each : adapters) torch::Tensor(each).normal_(0, 0.3);
}

std::shared_ptr<TiedGptImpl> make_gpt(const lora::LoraOptions& options = {.r = 2, .alpha = 8}) {
  auto net = std::make_shared<TiedGptImpl>(4);
  fill_adapters(lora::attach(*net, options));
  return net;
}

torch::Tensor ids_of(int rank, int step) {
  torch::manual_seed(seed_of(step, rank));
  return torch::randint(TiedGptImpl::kVocabulary, {3, TiedGptImpl::kLength});
}

torch::Tensor loss_of(TiedGptImpl& net, const torch::Tensor& ids) {
  const auto logits = net.forward(ids);
  return nn::functional::cross_entropy(logits.narrow(1, 0, ids.size(1) - 1).flatten(0, 1), ids.narrow(1, 1, ids.size(1) - 1).flatten());
}

fsdp::FsdpOptions block_options(bool adapters_whole = true) {
  fsdp::FsdpOptions options{.auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>()};
  if (adapters_whole) options.unsharded = fsdp::name_contains("lora_");
  return options;
}

void expect_near(const torch::Tensor& got, const torch::Tensor& want, double tolerance, const std::string& what) {
  const double difference = (got - want).abs().max().item<double>(), size = want.abs().max().item<double>();
  EXPECT(difference <= tolerance * size, what << " differs by " << difference << " at " << size);
}

void expect_equal_on_all_ranks(fsdp::ProcessGroup& group, const std::vector<torch::Tensor>& adapters, int step) {
  for (const auto& each : adapters) {
    const auto own = each.detach().reshape({-1}).clone();
    auto all = torch::empty({group.world_size() * own.numel()});
    group.collectives()->all_gather(all, own, "adapters of all ranks").wait();
    for (const auto& other : all.chunk(group.world_size())) EXPECT(torch::equal(other, own), "step " << step << ": adapters differ");
  }
}

// The ways to multiply by a weight: `weight` (out, in) except in FAN_IN.
enum class Way { LINEAR, MATMUL, MM, ADDMM, FAN_IN_ADDMM, FAN_IN_MATMUL };

struct ProductImpl : nn::Module {
  ProductImpl(Way way, int64_t in, int64_t out) : way(way) {
    const bool fan_in = way == Way::FAN_IN_ADDMM || way == Way::FAN_IN_MATMUL;
    weight = register_parameter("weight", fan_in ? torch::randn({in, out}) : torch::randn({out, in}));
    bias = register_parameter("bias", torch::randn({out}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    switch (way) {
      case Way::LINEAR:
        return nn::functional::linear(x, weight, bias);
      case Way::MATMUL:
        return torch::matmul(x, weight.t()) + bias;
      case Way::MM:
        return x.mm(weight.transpose(0, 1)) + bias;
      case Way::ADDMM:
        return torch::addmm(bias, x, weight.t());
      case Way::FAN_IN_ADDMM:
        return torch::addmm(bias, x, weight);
      case Way::FAN_IN_MATMUL:
        return torch::matmul(x, weight) + bias;
    }
    throw std::logic_error("unknown way");
  }
  Way way;
  torch::Tensor weight, bias;
};

struct TwoProductsImpl : nn::Module {
  TwoProductsImpl(Way way, int64_t in, int64_t out) {
    one = register_module("one", std::make_shared<ProductImpl>(way, in, out));
    two = register_module("two", nn::Linear(out, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return two(torch::tanh(one->forward(x))); }
  std::shared_ptr<ProductImpl> one;
  nn::Linear two{nullptr};
};

constexpr Way kWays[] = {Way::LINEAR, Way::MATMUL, Way::MM, Way::ADDMM, Way::FAN_IN_ADDMM, Way::FAN_IN_MATMUL};

lora::LoraOptions options_for(Way way) {
  return {.r = 3, .alpha = 6, .target_modules = {"one"}, .fan_in_fan_out = way == Way::FAN_IN_ADDMM || way == Way::FAN_IN_MATMUL};
}

}  // namespace

RANKS_TEST("an adapter is the explicit low-rank product, whichever way the weight is multiplied by", "[adapters][quick]", 1, 2) {
  for (const Way way : kWays)
    for (const auto& [in, out] : std::vector<std::pair<int64_t, int64_t>>{{5, 4}, {4, 4}, {1, 4}, {4, 1}})
      for (const bool wrapped : {false, true}) {
        torch::manual_seed(3);
        auto net = std::make_shared<TwoProductsImpl>(way, in, out);
        auto plain = std::make_shared<TwoProductsImpl>(way, in, out);
        copy_values(*plain, *net);
        const auto adapters = lora::attach(*net, options_for(way));
        EXPECT(adapters.size() == 2 && adapters[0].sizes() == torch::IntArrayRef({3, in}) &&
                   adapters[1].sizes() == torch::IntArrayRef({out, 3}),
               adapters.size() << " tensors");
        fill_adapters(adapters);
        const auto a = adapters[0].detach().clone().requires_grad_(), b = adapters[1].detach().clone().requires_grad_();
        const auto input = torch::randn({7, in}), x = input.clone().requires_grad_(), y = input.clone().requires_grad_();
        const auto wanted = plain->two(torch::tanh(plain->one->forward(x) + 2 * x.matmul(a.t()).matmul(b.t())));
        wanted.square().sum().backward();

        std::unique_ptr<fsdp::FullyShardedDataParallel<TwoProductsImpl>> model;
        if (wrapped)
          model = std::make_unique<fsdp::FullyShardedDataParallel<TwoProductsImpl>>(
              net, group, fsdp::FsdpOptions{.unsharded = fsdp::name_contains("lora_")});
        const auto got = wrapped ? (*model)(y) : net->forward(y);
        got.square().sum().backward();
        const std::string where = c10::str("way ", static_cast<int>(way), ", ", in, " to ", out, wrapped ? ", wrapped: " : ", plain: ");
        expect_near(got, wanted, 5e-7, where + "output");
        expect_near(y.grad(), x.grad(), 2e-6, where + "gradient of the input");
        expect_near(adapters[0].grad(), a.grad(), 2e-6, where + "gradient of A");
        expect_near(adapters[1].grad(), b.grad(), 2e-6, where + "gradient of B");
        EXPECT(!net->one->weight.grad().defined() && !net->two->weight.grad().defined(), where << "frozen weights got gradients");
      }
}

RANKS_TEST("attaching changes no output, freezes the rest, and registers in the target", "[adapters][quick]", 1) {
  auto net = std::make_shared<TiedGptImpl>(2);
  const auto before = net->forward(ids_of(0, 0)).detach();
  const auto adapters = lora::attach(*net, {.r = 4, .target_modules = {"query", "blocks.1.up"}});
  EXPECT(torch::equal(net->forward(ids_of(0, 0)).detach(), before), "the output changed");
  const auto parameters = net->named_parameters();
  std::vector<std::string> trainable;
  for (const auto& item : parameters)
    if (item.value().requires_grad()) trainable.push_back(item.key());
  EXPECT((trainable == std::vector<std::string>{"blocks.0.query.lora_A", "blocks.0.query.lora_B", "blocks.1.query.lora_A",
                                                "blocks.1.query.lora_B", "blocks.1.up.lora_A", "blocks.1.up.lora_B"}),
         trainable);
  EXPECT(adapters.size() == 6 && adapters[5].is_same(parameters["blocks.1.up.lora_B"]), adapters.size());
  EXPECT(adapters[0].abs().max().item<float>() <= 1 / std::sqrt(8.f) && adapters[0].abs().max().item<float>() > 0.1f, adapters[0]);
  expect_contains(lora::trainable_report(*net), {"224 of 1,680"});
  expect_contains(lora::trainable_report(*net), {"in 3 adapters"});
}

RANKS_TEST("adapters train as in the plain model", "[adapters][quick]", 1, 2, 3, 4) {
  for (const bool whole : {true, false}) {
    ParityOptions options;
    options.fsdp = block_options(whole);
    options.max_norm = 0.5;
    check_parity<TiedGptImpl>(
        group, [] { return make_gpt(); }, ids_of, loss_of, options);
  }
}

RANKS_TEST("a frozen base in bf16: half its bytes over N, no gradient memory, one gather per run", "[adapters][quick]", 3) {
  auto recorded = record(group);
  torch::manual_seed(group.rank());
  auto net = std::make_shared<TiedGptImpl>(4);
  int64_t base = 0;
  for (const auto& p : unique_parameters(*net)) base += p.numel();
  const auto adapters = lora::attach(*net, {.r = 2});
  auto options = block_options();
  options.mixed_precision = {.param_dtype = torch::kBFloat16, .keep_fp32 = {}};
  options.max_unsharded_bytes = int64_t{1} << 30;
  fsdp::FullyShardedDataParallel model(net, recorded.group, options);
  int64_t adapter_bytes = 0, norm_bytes = 0;
  for (const auto& p : adapters) adapter_bytes += static_cast<int64_t>(p.nbytes());
  for (const auto& unit : model.plan().units)
    for (const auto& g : unit.groups) {
      if (g.kept_wide) norm_bytes += g.shard_numel * 4;
      if (!g.replicated && !g.kept_wide) EXPECT(g.dtype == torch::kBFloat16, "a frozen matrix is kept in " << g.dtype);
    }
  // Norms stay fp32; each group is padded to 16 bytes a rank.
  int64_t groups = 0;
  for (const auto& unit : model.plan().units) groups += static_cast<int64_t>(unit.groups.size());
  const int64_t of_base = model.stats().shard_bytes - adapter_bytes - norm_bytes;
  EXPECT(of_base <= 2 * base / group.world_size() + groups * 16, of_base << " bytes of a base of " << base << " elements");

  torch::optim::AdamW optimizer(adapters, torch::optim::AdamWOptions(1e-2));
  recorded.log->clear();
  for (int step = 0; step < 4; ++step) {
    for (int micro = 0; micro < 2; ++micro)
      model.call([&](TiedGptImpl& m) { return loss_of(m, ids_of(group.rank(), 2 * step + micro)); }).backward();
    optimizer.step();
    optimizer.zero_grad();
    expect_equal_on_all_ranks(group, adapters, step);
  }
  int64_t gathered_groups = 0;
  for (const auto& unit : model.plan().units)
    for (const auto& g : unit.groups) gathered_groups += !g.replicated;
  EXPECT(recorded.log->count("reduce_scatter") == 0, recorded.log->text());
  EXPECT(recorded.log->count("all_gather") == gathered_groups, recorded.log->count("all_gather")
                                                                   << " gathers of " << gathered_groups << " groups in the run");
  EXPECT(model.stats().gradient_bytes == adapter_bytes, model.stats().gradient_bytes << " bytes of gradients, adapters " << adapter_bytes);
}

RANKS_TEST("a frozen base of 4 layers of width 64 takes 2 bytes an element over N ranks, within 1 %", "[adapters]", 3) {
  auto net = std::make_shared<nn::SequentialImpl>();
  for (int i = 0; i < 4; ++i) net->push_back(GptBlock(64, 4));
  int64_t base = 0;
  for (const auto& p : net->parameters()) base += p.numel();
  const auto adapters = lora::attach(*net, {.r = 2});
  fsdp::FullyShardedDataParallel model(net, group,
                                       {.auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>(),
                                        .mixed_precision = {.param_dtype = torch::kBFloat16},
                                        .unsharded = fsdp::name_contains("lora_")});
  int64_t adapter_bytes = 0;
  for (const auto& p : adapters) adapter_bytes += static_cast<int64_t>(p.nbytes());
  const double of_base = static_cast<double>(model.stats().shard_bytes - adapter_bytes), least = 2.0 * static_cast<double>(base) / 3;
  EXPECT(of_base <= 1.01 * least, of_base << " bytes, 2 bytes an element over 3 ranks are " << least);
}

RANKS_TEST("a small budget gathers a frozen base twice per micro-batch", "[adapters][quick]", 2) {
  auto recorded = record(group);
  auto net = make_gpt();
  auto options = block_options();
  fsdp::FullyShardedDataParallel model(net, recorded.group, options);
  int64_t root = 0, block = 0;
  for (const auto& unit : model.plan().units) (unit.name.empty() ? root : block) = unit.unsharded_bytes(2);
  auto fresh = make_gpt();
  options.max_unsharded_bytes = root + block;
  fsdp::FullyShardedDataParallel small(fresh, recorded.group, options);
  for (int step = 0; step < 3; ++step) {
    recorded.log->clear();
    small.call([&](TiedGptImpl& m) { return loss_of(m, ids_of(group.rank(), step)); }).backward();
  }
  // 4 blocks twice, but the last one of forward is the first of backward, and the last one of backward the first of the next forward.
  // The root is frozen too, and stays.
  EXPECT(recorded.log->count("all_gather") == 6, recorded.log->text());
}

// Each rank drew its own adapters, trained them alone, and rank 0's were saved; no loss could show it.
RANKS_TEST("F6: adapters attached to a wrapped model are the same on all ranks and train as in the plain model", "[adapters][quick]", 1, 2,
           3) {
  constexpr int kMicro = 2;
  torch::manual_seed(11);
  const auto make = [] { return std::make_shared<TiedGptImpl>(2); };
  auto net = make(), plain = make();
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::module_wrap_policy<GptBlockImpl>()});
  model.call([&](TiedGptImpl& m) { return loss_of(m, ids_of(group.rank(), 0)); }).backward();  // a step of full training before
  model.zero_grad();
  torch::manual_seed(100 + group.rank());  // each rank draws its own
  const auto adapters = lora::attach(model, {.r = 2, .target_modules = {"query", "value"}});
  EXPECT(adapters.size() == 8, adapters.size());
  expect_equal_on_all_ranks(group, adapters, -1);
  EXPECT(model.named_parameters().contains("blocks.1.value.lora_B"), "the wrapper does not know the adapter");

  const auto want = lora::attach(*plain, {.r = 2, .target_modules = {"query", "value"}});
  {
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < want.size(); ++i) torch::Tensor(want[i]).copy_(adapters[i]);
  }
  std::vector<torch::Tensor> trainable;
  for (const auto& p : model.parameters())
    if (p.requires_grad()) trainable.push_back(p);
  EXPECT(trainable.size() == adapters.size(), trainable.size() << " parameters train");
  fsdp::AdamW optimizer(model, {.lr = 1e-2});
  torch::optim::AdamW reference(want, torch::optim::AdamWOptions(1e-2));
  for (int step = 0; step < 3; ++step) {
    for (int micro = 0; micro < kMicro; ++micro) {
      model.call([&](TiedGptImpl& m) { return loss_of(m, ids_of(group.rank(), 10 * step + micro)) / kMicro; }).backward();
      for (int rank = 0; rank < group.world_size(); ++rank)
        (loss_of(*plain, ids_of(rank, 10 * step + micro)) / kMicro / group.world_size()).backward();
    }
    model.clip_grad_norm_(0.05);
    nn::utils::clip_grad_norm_(want, 0.05);
    optimizer.step();
    reference.step();
    model.zero_grad();
    reference.zero_grad();
    expect_equal_on_all_ranks(group, adapters, step);
    for (size_t i = 0; i < want.size(); ++i)
      EXPECT((adapters[i] - want[i]).norm().item<double>() <= 1e-5 * want[i].norm().item<double>(),
             "step " << step << ", adapter " << i << " differs by " << (adapters[i] - want[i]).norm());
  }
}

RANKS_TEST("merge folds the adapters into the weights, unmerge takes them out again", "[adapters][quick]", 1, 2, 3) {
  for (const bool wrapped : {false, true})
    for (const bool whole : {true, false}) {
      torch::manual_seed(5);
      auto net = make_gpt();
      std::unique_ptr<fsdp::FullyShardedDataParallel<TiedGptImpl>> model;
      if (wrapped) model = std::make_unique<fsdp::FullyShardedDataParallel<TiedGptImpl>>(net, group, block_options(whole));
      const auto ids = ids_of(0, 0);
      const torch::NoGradGuard no_grad;
      const auto run = [&] { return (wrapped ? (*model)(ids) : net->forward(ids)).clone(); };
      const auto weight = [&] {
        if (!wrapped) return net->blocks->at<GptBlockImpl>(2).up->weight.clone();
        const auto summoned = model->summon_full_params();
        return net->blocks->at<GptBlockImpl>(2).up->weight.clone();
      };
      const auto with = run(), before = weight();
      wrapped ? lora::merge(*model) : lora::merge(*net);
      EXPECT(!torch::allclose(weight(), before, 1e-3, 1e-3), "the weight is as it was");
      expect_near(run(), with, 1e-5, "merged output");
      expect_contains(error_of([&] { wrapped ? lora::merge(*model) : lora::merge(*net); }), {"merged already"});
      wrapped ? lora::unmerge(*model) : lora::unmerge(*net);
      expect_near(weight(), before, 1e-6, "unmerged weight");
      expect_near(run(), with, 1e-5, "unmerged output");
      expect_contains(error_of([&] { wrapped ? lora::unmerge(*model) : lora::unmerge(*net); }), {"is not merged"});
    }
}

RANKS_TEST("an adapter stays with its weight: converted, unwrapped, recomputed", "[adapters][quick]", 1, 2) {
  auto net = std::make_shared<MlpImpl>();
  fill_adapters(lora::attach(*net, {.r = 2}));
  const auto x = torch::randn({4, 6});
  torch::manual_seed(1);
  const auto wanted = net->forward(x).detach();
  net->to(torch::kDouble);
  expect_near(net->forward(x.to(torch::kDouble)).detach().to(torch::kFloat), wanted, 1e-5, "in double");
  net->to(torch::kFloat);
  auto model =
      std::make_unique<fsdp::FullyShardedDataParallel<MlpImpl>>(net, group, fsdp::FsdpOptions{.unsharded = fsdp::name_contains("lora_")});
  const auto wrapped = (*model)(x).detach();
  auto plain = model->unwrap();
  model.reset();
  expect_near(plain->forward(x).detach(), wrapped, 1e-6, "unwrapped");
}

RANKS_TEST("dropout of the adapter's input acts in training only", "[adapters][quick]", 1) {
  auto net = std::make_shared<MlpImpl>();
  fill_adapters(lora::attach(*net, {.r = 2, .dropout = 0.5}));
  const auto x = torch::randn({4, 6});
  const auto once = net->forward(x).detach();
  EXPECT(!torch::equal(net->forward(x).detach(), once), "two forwards in training are alike");
  net->eval();
  const auto evaluated = net->forward(x).detach();
  EXPECT(torch::equal(net->forward(x).detach(), evaluated), "two forwards in evaluation differ");
}

RANKS_TEST("what cannot get an adapter is refused by name, and nothing has changed", "[adapters][quick]", 1) {
  struct Case {
    lora::LoraOptions options;
    std::vector<std::string> contains;
  };
  const Case cases[] = {
      {{.r = 0}, {"r must be at least 1, got 0"}},
      {{.alpha = 0}, {"alpha must be positive"}},
      {{.dropout = 1}, {"dropout must be", "got 1"}},
      {{.target_modules = {}}, {"target_modules is empty"}},
      {{.target_modules = {"quary"}}, {"no module's path ends in 'quary'", "blocks.0.query"}},
      {{.target_modules = {"query", "ery"}}, {"ends in 'ery'"}},
      {{.target_modules = {"token"}}, {"'embed.token'", "looks rows up"}},
      {{.target_modules = {"norm1"}}, {"'blocks.0.norm1'", "shape [8]"}},
      {{.target_modules = {"blocks"}}, {"'blocks'", "no parameter 'weight'"}},
      {{.target_modules = {"head"}}, {"'head'", "shared by modules"}},
      {{.dtype = torch::kInt}, {"floating"}},
  };
  auto net = std::make_shared<TiedGptImpl>(2);
  const auto count = net->parameters().size();
  for (const auto& each : cases) {
    const auto error = error_of([&] { lora::attach(*net, each.options); });
    expect_contains(error, each.contains);
    EXPECT(net->parameters().size() == count && net->parameters()[0].requires_grad(), "something changed: " << error);
  }
  expect_contains(error_of([&] { lora::merge(*net); }), {"no adapters"});
  lora::attach(*net, {.target_modules = {"query"}});
  expect_contains(error_of([&] { lora::attach(*net, {.target_modules = {"query"}}); }), {"has an adapter already"});
  nn::Linear alone(4, 4);
  fsdp::FullyShardedDataParallel model(alone, group);
  expect_contains(error_of([&] { lora::attach(*alone); }), {"attach to the wrapper"});
}

RANKS_TEST("ranks that attach different adapters, or one that cannot, get the same error", "[adapters][quick]", 2, 3) {
  auto net = std::make_shared<MlpImpl>();
  fsdp::FullyShardedDataParallel model(net, group);
  expect_contains(error_of([&] { lora::attach(model, {.r = group.rank() == 1 ? 3 : 2}); }), {"the ranks attach different adapters"});
  const auto error = error_of([&] { lora::attach(model, {.target_modules = {group.rank() == 1 ? "fc9" : "fc1"}}); });
  expect_contains(error, {"no module's path ends in 'fc9'"});
  EXPECT(lora::attach(model, {.target_modules = {"fc1"}}).size() == 2, "attaching works afterwards");
}
