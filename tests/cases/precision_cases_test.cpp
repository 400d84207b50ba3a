// Faults that users of other systems met: dtypes that meet, means of means, and results that depend on how a model is cut.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
namespace nn = torch::nn;
using fsdp::ShardingStrategy;
using torch::Tensor;

namespace {

// `late` is used by the second micro-batch only.
struct LateImpl : nn::Module {
  LateImpl() {
    always = register_module("always", nn::Linear(6, 6));
    late = register_module("late", nn::Linear(6, 6));
  }
  Tensor forward(const Tensor& x, bool with_late) { return with_late ? late(always(x)) : always(x); }
  nn::Linear always{nullptr}, late{nullptr};
};

Tensor input_of(int rank, int micro) {
  torch::manual_seed(seed_of(micro, rank));
  return torch::randn({5, 6});
}

fsdp::FsdpOptions narrow_options() {
  return {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>(),
          .mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat, .keep_frozen_master = true}};
}

// The mean over ranks, in fp32, of gradients computed in bf16 from bf16 copies of `master`.
std::vector<Tensor> gradients_by_hand(LateImpl& master, int world_size, int micro_batches) {
  std::vector<Tensor> sums;
  for (const auto& p : master.parameters()) sums.push_back(torch::zeros_like(p));
  for (int rank = 0; rank < world_size; ++rank)
    for (int micro = 0; micro < micro_batches; ++micro) {
      LateImpl narrow;
      copy_values(narrow, master);
      narrow.to(torch::kBFloat16);
      narrow.forward(input_of(rank, micro).to(torch::kBFloat16), micro == 1).square().sum().backward();
      const auto parameters = narrow.parameters();
      for (size_t i = 0; i < sums.size(); ++i)
        if (parameters[i].grad().defined()) sums[i] += parameters[i].grad().to(torch::kFloat) / world_size;
    }
  return sums;
}

// Every rank's slices of the gradients, whole.
std::vector<Tensor> whole_gradients(fsdp::FullyShardedDataParallel<LateImpl>& model) {
  auto plain = model.unwrap();
  std::vector<Tensor> gradients;
  for (const auto& p : plain->parameters()) gradients.push_back(p.grad());
  return gradients;
}

void expect_gradients(const std::vector<Tensor>& got, const std::vector<Tensor>& wanted, const std::string& where) {
  for (size_t i = 0; i < wanted.size(); ++i) {
    EXPECT(got[i].defined() && got[i].scalar_type() == torch::kFloat, where << "gradient " << i);
    const double difference = (got[i] - wanted[i]).norm().item<double>(), size = wanted[i].norm().item<double>();
    EXPECT(size > 0 && difference <= 1e-5 * size, where << "gradient " << i << " differs by " << difference << " at a norm of " << size);
  }
}

}  // namespace

// A parameter first used in the last micro-batch brought a bf16 gradient to a reduction whose others had been accumulated in fp32.
RANKS_TEST("D7: fresh and accumulated gradients of a narrow model meet in one reduction", "[cases][precision][quick]", 1, 2, 3) {
  for (const bool keeps_whole : {false, true}) {
    torch::manual_seed(7);
    auto net = std::make_shared<LateImpl>();
    const auto wanted = gradients_by_hand(*net, group.world_size(), 2);
    fsdp::FullyShardedDataParallel model(net, group, narrow_options());
    const auto first = [&] { model(input_of(group.rank(), 0), false).square().sum().backward(); };
    if (keeps_whole) {
      const auto kept = model.no_sync();
      first();
    } else {
      first();
    }
    model(input_of(group.rank(), 1), true).square().sum().backward();
    expect_gradients(whole_gradients(model), wanted, keeps_whole ? "no_sync: " : "synced: ");
  }
}

// Dtypes were resolved in the first forward from what was trainable then: after a frozen one gradients were reduced in bf16.
RANKS_TEST("D8: a model that was frozen in its first forward reduces in the dtype of its options", "[cases][precision][quick]", 1, 2, 3) {
  enum class Frozen { NEVER, AT_WRAP, AFTER_WRAP };
  int64_t bytes_when_never = 0;
  for (const Frozen frozen : {Frozen::NEVER, Frozen::AT_WRAP, Frozen::AFTER_WRAP}) {
    torch::manual_seed(7);
    auto net = std::make_shared<LateImpl>();
    const auto wanted = gradients_by_hand(*net, group.world_size(), 2);
    const auto set_trainable = [&](bool trainable) {
      for (auto& p : net->parameters()) p.set_requires_grad(trainable);
    };
    if (frozen == Frozen::AT_WRAP) set_trainable(false);
    auto recorded = record(group);
    fsdp::FullyShardedDataParallel model(net, recorded.group, narrow_options());
    if (frozen == Frozen::AFTER_WRAP) set_trainable(false);
    model.eval();
    model(input_of(0, 0), true);
    set_trainable(true);
    model.train();
    recorded.log->clear();
    for (int micro = 0; micro < 2; ++micro) model(input_of(group.rank(), micro), micro == 1).square().sum().backward();
    const auto bytes = recorded.log->bytes("reduce_scatter");
    if (frozen == Frozen::NEVER) bytes_when_never = bytes;
    EXPECT(bytes == bytes_when_never, bytes << " bytes reduced, never frozen " << bytes_when_never);
    const int64_t least = 3 * (6 * 6 + 6) * 4;  // fp32: `always` twice, `late` once
    EXPECT(group.world_size() == 1 || bytes >= least, bytes << " bytes reduced, in fp32 at least " << least);
    expect_gradients(whole_gradients(model), wanted, c10::str("frozen ", static_cast<int>(frozen), ": "));
  }
}

// A rank with few tokens weighed as much as a full one, and the division could not be undone.
RANKS_TEST("D10: rows that ranks have unequally many of weigh alike with a divisor of all rows", "[cases][precision][quick]", 2, 3) {
  const int64_t own_rows = 1 + 2 * group.rank(), all_rows = group.world_size() * group.world_size();
  const auto all = input_of(0, 0).repeat({2, 1}).narrow(0, 0, all_rows) * torch::arange(1, all_rows + 1).unsqueeze(1);
  const auto own = all.narrow(0, group.rank() * group.rank(), own_rows);
  torch::manual_seed(7);
  auto net = std::make_shared<LateImpl>(), plain = std::make_shared<LateImpl>();
  copy_values(*plain, *net);
  plain->forward(all, true).square().sum(1).mean().backward();
  std::vector<Tensor> wanted;
  for (const auto& p : plain->parameters()) wanted.push_back(p.grad());
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::module_wrap_policy<nn::LinearImpl>()});
  model.set_gradient_divisor(static_cast<double>(all_rows));
  model(own, true).square().sum(1).sum().backward();
  expect_gradients(whole_gradients(model), wanted, "");
}

// Loss curves differed between stages and bucket sizes although the mathematics is the same.
RANKS_TEST("D11: three steps are bit-equal for every unit size and strategy", "[cases][precision][quick]", 2) {
  std::vector<Tensor> first;
  for (const auto strategy : {ShardingStrategy::FULL_SHARD, ShardingStrategy::SHARD_GRAD_OP})
    for (const int64_t threshold : {int64_t{0}, int64_t{10}, INT64_MAX}) {
      torch::manual_seed(7);
      auto net = std::make_shared<TiedGptImpl>(2);
      fsdp::FullyShardedDataParallel model(
          net, group, {.sharding_strategy = strategy, .auto_wrap_policy = fsdp::size_based_auto_wrap_policy(threshold)});
      torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-2));
      for (int step = 0; step < 3; ++step) {
        torch::manual_seed(seed_of(step, group.rank()));
        model(torch::randint(TiedGptImpl::kVocabulary, {3, TiedGptImpl::kLength})).square().mean().backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      const auto parameters = model.unwrap()->parameters();
      for (size_t i = 0; i < parameters.size(); ++i) {
        if (first.size() < parameters.size()) first.push_back(parameters[i].detach().clone());
        EXPECT(torch::equal(parameters[i], first[i]), "threshold " << threshold << ", parameter " << i << " differs");
      }
    }
}
