// Ten models of different style, as LibTorch users write them, each trained sharded and plain: bit-equal on one rank, within bounds on
// more (support/parity.h).

#include <fsdp/fsdp.h>

#include "models/actor_critic.h"
#include "models/attention_net.h"
#include "models/flow.h"
#include "models/graph_sampler.h"
#include "models/residual_net.h"
#include "models/seq2seq.h"
#include "models/sequential_classifier.h"
#include "models/siamese.h"
#include "models/text_classifier.h"
#include "models/vae.h"
#include "support/models.h"
#include "support/parity.h"
#include "support/ranks.h"

using namespace fsdp::testing;
using torch::Tensor;
namespace F = torch::nn::functional;
namespace nn = torch::nn;

namespace {

struct Batch {
  Tensor input, target;
  int step = 0;
};

// draw() makes the batch under a generator that rank and step determine.
template <class Draw>
auto batches(Draw draw) {
  return [draw](int rank, int step) {
    torch::manual_seed(100 + 10 * step + rank);
    Batch batch = draw();
    batch.step = step;
    return batch;
  };
}

fsdp::FsdpOptions in_units_of(int64_t elements) { return {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(elements)}; }

}  // namespace

RANKS_TEST("models: variational autoencoder", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::Vae>(
      group, [] { return std::make_shared<models::Vae>(12, 10, 4); }, batches([] {
        return Batch{torch::rand({5, 12}), {}};
      }),
      [](models::Vae& m, const Batch& batch) { return models::vae_loss(m.forward(batch.input), batch.input); }, {.fsdp = in_units_of(1)});
}

RANKS_TEST("models: a model on the stack, used through ->, with a struct returned", "[models][quick]", 1, 2) {
  torch::manual_seed(3);
  models::Vae net(12, 10, 4), plain(12, 10, 4);
  copy_values(net, plain);
  fsdp::FullyShardedDataParallel model(net, group, in_units_of(1));
  const auto x = torch::rand({5, 12});
  torch::manual_seed(4);
  const models::VaeOutput got = model(x);
  torch::manual_seed(4);
  const models::VaeOutput want = plain.forward(x);
  EXPECT(torch::equal(got.reconstruction, want.reconstruction) && torch::equal(got.mu, want.mu), "forward");
  EXPECT(torch::equal(model->encode(x).first, plain.encode(x).first), "encode");
  torch::manual_seed(5);
  const auto sample = model->sample(3);
  torch::manual_seed(5);
  EXPECT(torch::equal(sample, plain.sample(3)), "sample");
  models::vae_loss(got, x).backward();
  EXPECT(model.stats().resident_unsharded_bytes == 0, "memory kept at rest");
}

RANKS_TEST("models: actor and critic", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::ActorCritic>(
      group, [] { return std::make_shared<models::ActorCritic>(4, 2); }, batches([] {
        return Batch{torch::randn({6, 4}), {}};
      }),
      [](models::ActorCritic& m, const Batch& batch) { return models::ppo_loss(m, batch.input); },
      {.fsdp = in_units_of(20), .max_norm = 0.5});
}

RANKS_TEST("models: recurrent encoder and decoder", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::Seq2SeqImpl>(
      group, [] { return std::make_shared<models::Seq2SeqImpl>(models::Seq2SeqOptions().dropout(0.2)); }, batches([] {
        return Batch{torch::randint(0, 11, {3, 5}), torch::randint(0, 11, {3, 4})};
      }),
      [](models::Seq2SeqImpl& m, const Batch& batch) {
        const auto [logits, states] = m.forward(batch.input, batch.target);
        auto loss = F::cross_entropy(logits.flatten(0, 1), batch.target.flatten());
        for (const auto& state : states) loss = loss + 1e-3 * state.square().mean();
        // Without a target it goes its own way.
        if (batch.step % 2) loss = loss + std::get<0>(m.forward(batch.input, {}, 2, torch::ones({3, 5}))).square().mean();
        return loss;
      },
      {.fsdp = in_units_of(1)});
}

RANKS_TEST("models: a bare Sequential with Functional, BatchNorm and dropout", "[models][quick]", 1, 2, 3, 4) {
  check_parity<nn::SequentialImpl>(
      group, models::make_sequential_classifier, batches([] {
        return Batch{torch::randn({6, 1, 9, 9}), torch::randint(0, 5, {6})};
      }),
      [](nn::SequentialImpl& m, const Batch& batch) { return F::nll_loss(m.forward(batch.input), batch.target); },
      {.fsdp = in_units_of(10)});
}

RANKS_TEST("models: EmbeddingBag, parameter containers and a penalty over named_parameters()", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::TextClassifierImpl>(
      group, [] { return std::make_shared<models::TextClassifierImpl>(13, 6, 3); }, batches([] {
        return Batch{torch::randint(0, 13, {9}), torch::randint(0, 3, {3})};
      }),
      [](models::TextClassifierImpl& m, const Batch& batch) {
        return models::penalised_loss(m, m.forward(batch.input, torch::tensor({0, 4, 6})), batch.target);
      },
      {.fsdp = in_units_of(1)});
}

RANKS_TEST("models: residual network with BatchNorm, spectral norm and buffers written in forward", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::ResidualNetImpl>(
      group, [] { return std::make_shared<models::ResidualNetImpl>(); }, batches([] {
        return Batch{torch::randn({4, 1, 8, 8}), torch::randint(0, 5, {4})};
      }),
      [](models::ResidualNetImpl& m, const Batch& batch) {
        const auto [logits, features] = m.forward(batch.input);
        return F::cross_entropy(logits, batch.target) + 1e-2 * features.square().mean();
      },
      {.fsdp = in_units_of(30)});
}

// Of the packed projection's bias, the third for keys cancels out of the softmax.
RANKS_TEST("models: transformer encoder and attention pooling with dropout", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::AttentionNetImpl>(
      group, [] { return std::make_shared<models::AttentionNetImpl>(); }, batches([] {
        return Batch{torch::randn({5, 3, 8}), torch::randint(0, 4, {3})};
      }),
      [](models::AttentionNetImpl& m, const Batch& batch) {
        const auto [logits, weights] = m.forward(batch.input, torch::zeros({3, 5}, torch::kBool));
        return F::cross_entropy(logits, batch.target) + weights.square().mean();
      },
      {.fsdp = in_units_of(100),
       .skip = {"encoder.layers.0.self_attn.in_proj_bias", "encoder.layers.1.self_attn.in_proj_bias", "pooling.in_proj_bias"}});
}

// The first batch is the same on all ranks: WRITE_THROUGH wants every rank to write the same values.
RANKS_TEST("models: a flow that initialises itself from data and writes masks into its weights", "[models][quick]", 1, 2, 3, 4) {
  auto options = in_units_of(1);
  options.parameter_writes = fsdp::ParameterWrites::WRITE_THROUGH;
  check_parity<models::FlowImpl>(
      group, [] { return std::make_shared<models::FlowImpl>(4, 3); },
      [](int rank, int step) {
        torch::manual_seed(100 + 10 * step + (step ? rank : 0));
        return Batch{2 * torch::randn({8, 4}) + 1, {}, step};
      },
      [](models::FlowImpl& m, const Batch& batch) { return models::negative_log_likelihood(m, batch.input); }, {.fsdp = options});
}

RANKS_TEST("models: one encoder under two names, and a branch that odd steps leave out", "[models][quick]", 1, 2, 3, 4) {
  check_parity<models::SiameseImpl>(
      group, [] { return std::make_shared<models::SiameseImpl>(); }, batches([] {
        return Batch{torch::randn({4, 6}), torch::randn({4, 6})};
      }),
      [](models::SiameseImpl& m, const Batch& batch) { return m.forward(batch.input, batch.target, batch.step % 2 == 0).mean(); },
      {.fsdp = in_units_of(1), .steps = 5});
}

RANKS_TEST("models: graph network with a GRU called every round", "[models][quick]", 1, 2, 3, 4) {
  const auto graph = [](int rank, int step) {
    torch::manual_seed(100 + 10 * step + rank);
    return models::GraphBatch{
        torch::randn({7, 6}), torch::randint(0, 7, {12}), torch::randint(0, 7, {12}), {{"target", torch::rand({7}).round()}}};
  };
  check_parity<models::GraphNet>(
      group, [] { return std::make_shared<models::GraphNet>(6); }, graph,
      [](models::GraphNet& m, const models::GraphBatch& batch) {
        auto weights = m.sample(batch) + 0.5;  // self-training, in the middle of the step
        return *m.forward(batch) + (weights * *m.forward(batch, true)).square().mean() * 1e-2;
      },
      {.fsdp = in_units_of(1)});
}
