// Sharded training gives the numbers of plain training: see support/parity.h for the reference and the bounds.

#include <fsdp/fsdp.h>

#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"

using namespace fsdp::testing;
namespace F = torch::nn::functional;

namespace {

struct Labelled {
  torch::Tensor input, target;
};

Labelled vectors(int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  return {torch::randn({5, 6}), torch::randint(0, 3, {5})};
}

Labelled images(int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  return {torch::randn({4, 1, 12, 12}), torch::randint(0, 10, {4})};
}

Labelled texts(int rank, int step) {
  torch::manual_seed(100 + 10 * step + rank);
  auto ids = torch::randint(0, TiedGptImpl::kVocabulary, {3, TiedGptImpl::kLength + 1});
  return {ids.slice(1, 0, TiedGptImpl::kLength), ids.slice(1, 1)};
}

const auto classify = [](auto& module, const Labelled& batch) { return F::cross_entropy(module.forward(batch.input), batch.target); };
const auto predict = [](TiedGptImpl& module, const Labelled& batch) {
  return F::cross_entropy(module.forward(batch.input).flatten(0, 1), batch.target.flatten());
};

template <class... Units>
fsdp::WrapPolicy units_of() {
  return [](const torch::nn::Module& module, bool recurse, int64_t) { return recurse || (dynamic_cast<const Units*>(&module) || ...); };
}

}  // namespace

RANKS_TEST("parity: MLP", "[wrappers][parity][quick]", 1, 2, 3, 4) {
  check_parity<MlpImpl>(group, [] { return std::make_shared<MlpImpl>(); }, vectors, classify,
                        {.fsdp = {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)}});
}

RANKS_TEST("parity: MLP as one unit, optimizer built after wrapping, clipped", "[wrappers][parity][quick]", 1, 2, 3, 4) {
  check_parity<MlpImpl>(group, [] { return std::make_shared<MlpImpl>(); }, vectors, classify,
                        {.max_norm = 0.3, .optimizer_before_wrapping = false});
}

RANKS_TEST("parity: convolutional network", "[wrappers][parity][quick]", 1, 2, 3, 4) {
  check_parity<ConvNetImpl>(group, [] { return std::make_shared<ConvNetImpl>(); }, images, classify,
                            {.fsdp = {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(100)}});
}

// The matrix belongs to the root unit, the smallest that contains both of its users. Key biases cancel out of the softmax: their true
// gradient is zero, and Adam moves them by rounding noise.
RANKS_TEST("parity: GPT with tied embedding, the head in another unit", "[wrappers][parity][quick]", 1, 2, 3, 4) {
  check_parity<TiedGptImpl>(group, [] { return std::make_shared<TiedGptImpl>(); }, texts, predict,
                            {.fsdp = {.auto_wrap_policy = units_of<EmbedImpl, GptBlockImpl, TiedHeadImpl>()},
                             .skip = {"blocks.0.key.bias", "blocks.1.key.bias"}});
}

RANKS_TEST("parity: two forwards before one backward", "[wrappers][parity][quick]", 1, 2, 3, 4) {
  const auto twice = [](MlpImpl& m, const Labelled& batch) {
    return F::cross_entropy(m.forward(batch.input), batch.target) + m.forward(batch.input * 2).square().mean();
  };
  check_parity<MlpImpl>(group, [] { return std::make_shared<MlpImpl>(); }, vectors, twice,
                        {.fsdp = {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)}});
}

RANKS_TEST("parity: forward through (), ->, call and a module on the stack are the same", "[wrappers][parity][quick]", 1, 2) {
  torch::manual_seed(3);
  Mlp net;
  MlpImpl on_stack;
  copy_values(on_stack, *net);
  const auto batch = vectors(group.rank(), 0);
  const auto want = net->forward(batch.input).detach();
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  fsdp::FullyShardedDataParallel stack_model(on_stack, group);
  torch::NoGradGuard no_grad;
  EXPECT(torch::equal(model(batch.input), want), "()");
  EXPECT(torch::equal(model.forward(batch.input), want), "forward");
  EXPECT(torch::equal(model->forward(batch.input), want), "->");
  EXPECT(torch::equal(model.call([&](auto& m) { return m.forward(batch.input); }), want), "call");
  EXPECT(torch::equal(stack_model(batch.input), want), "module on the stack");
  EXPECT(model.stats().resident_unsharded_bytes == 0, "evaluation leaves units gathered");
}

RANKS_TEST("gradients accumulate over backwards until zero_grad, as in the plain run", "[wrappers][parity][quick]", 1, 2, 3, 4) {
  torch::manual_seed(5);
  Mlp net, plain;
  copy_values(*plain, *net);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(1)});
  torch::optim::SGD optimizer(model.parameters(), 1.0), plain_optimizer(plain->parameters(), 1.0);
  for (const bool set_to_none : {true, false, true}) {
    for (int micro_batch = 0; micro_batch < 3; ++micro_batch) {
      const auto mine = vectors(group.rank(), micro_batch);
      F::cross_entropy(model(mine.input), mine.target).backward();
      for (int r = 0; r < group.world_size(); ++r) {
        const auto other = vectors(r, micro_batch);
        (F::cross_entropy(plain->forward(other.input), other.target) / group.world_size()).backward();
      }
    }
    optimizer.step();
    plain_optimizer.step();
    optimizer.zero_grad(set_to_none);
    plain_optimizer.zero_grad(set_to_none);
    expect_same_parameters(model, *plain, group.world_size());
  }
}
