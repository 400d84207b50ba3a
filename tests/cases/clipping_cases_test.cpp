// Norms of one rank's part, largest elements of 1, gradients flipped by a sentinel, ranks that left before the collective.

#include <fsdp/fsdp.h>

#include <cmath>
#include <limits>

#include "support/expect_contains.h"
#include "support/given_gradients.h"
#include "support/rank_part.h"
#include "support/ranks.h"
#include "support/recording_collectives.h"

using namespace fsdp::testing;
using torch::Tensor;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
using Model = fsdp::FullyShardedDataParallel<BagsImpl>;

// The gradients that one process would have: the mean over the ranks' ones.
std::vector<Tensor> mean_gradients(int world_size, torch::Dtype of_second = torch::kFloat) {
  std::vector<Tensor> mean;
  for (int rank = 0; rank < world_size; ++rank) {
    const auto gradients = random_gradients(rank, of_second);
    for (size_t i = 0; i < gradients.size(); ++i)
      rank ? void(mean[i] += gradients[i] / world_size) : mean.push_back(gradients[i] / world_size);
  }
  return mean;
}

void backward(Model& model, const fsdp::ProcessGroup& group, torch::Dtype of_second = torch::kFloat) {
  model.zero_grad();
  model(random_gradients(group.rank(), of_second)).backward();
}

// Each gradient is summed up over ranks by unwrapping a model that nothing else needs.
std::vector<Tensor> whole_gradients(Model& model) {
  std::vector<Tensor> gradients;
  for (const auto& parameter : model.unwrap()->parameters()) gradients.push_back(parameter.grad());
  return gradients;
}

bool all_parts(const Model& model, const std::function<bool(const Tensor&)>& holds) {
  for (const auto& parameter : model.parameters())
    if (parameter.grad().defined() && !holds(rank_part(parameter.grad()))) return false;
  return true;
}

// All ranks got the very same numbers, bit for bit.
void expect_agreement(const fsdp::ProcessGroup& group, const fsdp::ClipResult& result) {
  std::ostringstream text;
  text << std::hexfloat << std::abs(result.norm) << " " << std::abs(result.coefficient);  // NaN has a sign
  for (const auto& other : group.collectives()->exchange("clipping", text.str()))
    EXPECT(other == text.str(), "here " << text.str() << ", on another rank " << other);
}

}  // namespace

// Each rank clipped by the norm of its own shard, so that the shards of one tensor were scaled differently; the largest element was
// computed by the exponent 1/inf and came out as 1.
RANKS_TEST("C1, C3: norms 1, 2, 3, any and the largest, of all ranks' elements, above and below the bound", "[cases][clipping][quick]", 1,
           2, 3, 4) {
  for (const double norm_type : {1.0, 2.0, 3.0, 2.5, kInf})
    for (const double bound : {1e-2, 1e9}) {
      auto plain = std::make_shared<BagsImpl>();
      auto parameters = plain->parameters();
      const auto wanted = mean_gradients(group.world_size());
      std::vector<Tensor> with_elements;  // LibTorch's own clipping by the largest throws on an empty gradient
      for (size_t i = 0; i < parameters.size(); ++i) {
        parameters[i].mutable_grad() = wanted[i];
        if (parameters[i].numel()) with_elements.push_back(parameters[i]);
      }
      const double norm = torch::nn::utils::clip_grad_norm_(with_elements, bound, norm_type);

      auto recorded = record(group);
      Model model(std::make_shared<BagsImpl>(), recorded.group, {.auto_wrap_policy = one_unit_per_bag()});
      backward(model, group);
      recorded.log->clear();
      const auto result = model.clip_grad_norm_(bound, norm_type);
      const auto where = c10::str("norm ", norm_type, ", bound ", bound, ": ");
      EXPECT(recorded.log->text() == (group.world_size() == 1 ? "" : "all_reduce clip_grad_norm_\n"), where << recorded.log->text());
      EXPECT(std::abs(result.norm - norm) <= 1e-6 * norm, where << result.norm << " instead of " << norm);
      const double coefficient = std::min(1.0, bound / (norm + 1e-6));
      EXPECT(std::abs(result.coefficient - coefficient) <= 1e-6 * coefficient, where << result.coefficient << " != " << coefficient);
      expect_agreement(group, result);
      const auto got = whole_gradients(model);
      for (size_t i = 0; i < got.size(); ++i)
        EXPECT(torch::allclose(got[i], parameters[i].grad(), 1e-5, 1e-12), where << "gradient " << i << ": " << got[i]);
    }
}

// Masking by 0 * inf gave nan, a norm of -1 as a sign of overflow flipped every gradient, and a gradient of zeros hit an assertion.
RANKS_TEST("C4: a norm that is not finite is the same on all ranks and follows LibTorch; zeros stay", "[cases][clipping][quick]", 1, 2, 3,
           4) {
  const int last = group.world_size() - 1;
  struct Injection {
    int rank;
    double value;
  };
  for (const double norm_type : {1.0, 2.0, 3.0, kInf})
    for (const auto& [rank, value] : {Injection{std::min(1, last), kInf}, {std::min(1, last), -kInf}, {0, std::nan("")}}) {
      Model model(std::make_shared<BagsImpl>(), group, {.auto_wrap_policy = one_unit_per_bag()});
      backward(model, group);
      const auto weight = model.parameters().front();  // 6 elements: ranks 0 and 1 have some
      const auto before = rank_part(weight.grad());
      if (group.rank() == rank) EXPECT(put_into_gradient(weight, value), "no element to write to");
      const auto result = model.clip_grad_norm_(1.0, norm_type);
      const auto where = c10::str("norm ", norm_type, ", ", value, " on rank ", rank, ": ");
      expect_agreement(group, result);
      const auto part = rank_part(weight.grad());
      if (std::isnan(value)) {
        EXPECT(std::isnan(result.norm) && std::isnan(result.coefficient), where << result.norm << " " << result.coefficient);
        EXPECT(all_parts(model, [](const Tensor& t) { return torch::isnan(t).all().item<bool>(); }), where << "gradients " << part);
      } else {
        EXPECT(result.norm == kInf && result.coefficient == 0, where << result.norm << " " << result.coefficient);
        EXPECT(all_parts(model, [](const Tensor& t) { return (torch::isnan(t) | (t == 0)).all().item<bool>(); }), where << part);
        EXPECT(torch::isnan(part).sum().item<int>() == (group.rank() == rank ? 1 : 0), where << "gradients " << part);
      }
    }
  for (const double norm_type : {1.0, 2.0, 3.0, kInf})
    for (const double bound : {0.0, 1.0}) {
      Model model(std::make_shared<BagsImpl>(), group, {.auto_wrap_policy = one_unit_per_bag()});
      auto zeros = random_gradients(group.rank());
      for (auto& gradient : zeros) gradient.zero_();
      model(zeros).backward();
      const auto result = model.clip_grad_norm_(bound, norm_type);
      EXPECT(result.norm == 0 && result.coefficient == std::min(1.0, bound / 1e-6), result.norm << " " << result.coefficient);
      EXPECT(all_parts(model, [](const Tensor& t) { return (t == 0).all().item<bool>(); }), "zeros changed");
    }
}

// Clipping refused a model of two dtypes, or hung: ranks without gradients had left before the collective.
RANKS_TEST("C7: units of several dtypes, frozen parts and ranks without any gradient", "[cases][clipping][quick]", 1, 2, 3, 4) {
  for (const double norm_type : {1.0, 2.0, 3.0, kInf}) {
    const auto wanted = mean_gradients(group.world_size(), torch::kBFloat16);
    auto net = std::make_shared<BagsImpl>(torch::kBFloat16);
    for (const auto& name : {"large.p3", "own"}) net->named_parameters()[name].requires_grad_(false);
    std::vector<Tensor> norms;
    for (size_t i = 0; i < wanted.size(); ++i)
      if (net->parameters()[i].requires_grad() && wanted[i].numel())
        norms.push_back(torch::linalg_vector_norm(wanted[i], norm_type, c10::nullopt, false, torch::kDouble));
    const double norm = torch::linalg_vector_norm(torch::stack(norms), norm_type).item<double>();

    Model model(net, group, {.auto_wrap_policy = one_unit_per_bag()});
    backward(model, group, torch::kBFloat16);
    const auto before = rank_part(model.named_parameters()["second.p0"].grad());  // in bf16
    const auto result = model.clip_grad_norm_(norm / 4, norm_type);
    EXPECT(std::abs(result.norm - norm) <= 1e-2 * norm, "norm " << norm_type << ": " << result.norm << " instead of " << norm);
    expect_agreement(group, result);
    const auto scaled = (before.to(torch::kFloat) * result.coefficient).to(torch::kBFloat16);
    EXPECT(torch::equal(rank_part(model.named_parameters()["second.p0"].grad()), scaled),
           "each gradient is scaled in its own dtype, rounded once");

    // One rank has dropped its gradients: it takes part all the same.
    backward(model, group, torch::kBFloat16);
    if (group.rank() == 0) model.zero_grad();
    const auto less = model.clip_grad_norm_(1.0, norm_type);
    expect_agreement(group, less);
    EXPECT(group.world_size() > 1 || less.norm == 0, less.norm);
    model.zero_grad();
    EXPECT(model.clip_grad_norm_(1.0, norm_type).norm == 0, "no gradients, no norm");
  }
}

RANKS_TEST("clip_grad_value_ bounds each element, and names what has no order", "[clipping][quick]", 1, 2, 3) {
  Model model(std::make_shared<BagsImpl>(torch::kBFloat16), group, {.auto_wrap_policy = one_unit_per_bag()});
  backward(model, group, torch::kBFloat16);
  std::vector<Tensor> wanted;
  for (const auto& parameter : model.parameters()) wanted.push_back(rank_part(parameter.grad()).clamp(-0.25, 0.25));
  model.clip_grad_value_(0.25);
  const auto parameters = model.parameters();
  for (size_t i = 0; i < wanted.size(); ++i) EXPECT(torch::equal(rank_part(parameters[i].grad()), wanted[i]), "gradient " << i);

  struct WaveImpl : torch::nn::Module {
    WaveImpl() { register_parameter("wave", torch::ones({5}, torch::kComplexFloat)); }
    Tensor forward() { return torch::view_as_real(parameters()[0] * 2).sum(); }
  };
  fsdp::FullyShardedDataParallel wave(std::make_shared<WaveImpl>(), group);
  wave.clip_grad_value_(0.25);
  wave.forward().backward();
  expect_contains(error_of([&] { wave.clip_grad_value_(0.25); }), {"parameter 'wave' is complex", "clip_grad_norm_"});
  EXPECT(std::abs(wave.clip_grad_norm_(1.0).norm - std::sqrt(5 * 8.0)) < 1e-5, "the norm of complex gradients");
}
