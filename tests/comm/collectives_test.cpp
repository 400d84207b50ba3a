// Every collective against a computation by one process that knows what all ranks put in.
// Sizes that are zero or do not divide, and dtypes that backends differ in (H8): against a serial computation.
#include "comm/collectives.h"
#include "support/ranks.h"

#include <torch/torch.h>

namespace {

using fsdp::comm::Collectives;
using fsdp::comm::Pending;

const std::vector<int64_t> kSizes{0, 1, 3, 1000};
const std::vector<at::ScalarType> kTypes{at::kFloat, at::kBFloat16, at::kHalf, at::kLong};

// What rank `rank` puts in: small whole numbers, whose sums over four ranks are exact in every dtype used.
torch::Tensor values(int rank, int64_t n, at::ScalarType type) { return (torch::arange(n) % 17 + 10 * rank).to(type); }

torch::Tensor sum_of_values(int world_size, int64_t n, at::ScalarType type) {
  auto sum = torch::zeros({n}, at::kLong);
  for (int rank = 0; rank < world_size; ++rank) sum += values(rank, n, at::kLong);
  return sum.to(type);
}

torch::Tensor all_values(int world_size, int64_t n, at::ScalarType type) {
  std::vector<torch::Tensor> blocks;
  for (int rank = 0; rank < world_size; ++rank) blocks.push_back(values(rank, n, type));
  return torch::cat(blocks);
}

template <class Body>
void for_each_case(Body body) {
  for (const auto type : kTypes)
    for (const auto n : kSizes) body(type, n);
}

#define EXPECT_EQUAL(actual, expected, type, n) \
  EXPECT(torch::equal(actual, expected),        \
         "rank " << group.rank() << ", " << type << ", n = " << n << ": got " << actual << " for " << expected)

}  // namespace

RANKS_TEST("all_gather puts rank i's values at block i", "[comm][quick]", 1, 2, 3, 4) {
  const auto collectives = group.collectives();
  for_each_case([&](at::ScalarType type, int64_t n) {
    auto output = torch::full({n * group.world_size()}, -1, type);
    collectives->all_gather(output, values(group.rank(), n, type), "a test").wait();
    EXPECT_EQUAL(output, all_values(group.world_size(), n, type), type, n);

    auto in_place = torch::full({n * group.world_size()}, -1, type);
    auto own = in_place.narrow(0, group.rank() * n, n);
    own.copy_(values(group.rank(), n, type));
    collectives->all_gather(in_place, own, "a test in place").wait();
    EXPECT_EQUAL(in_place, output, type, n);
  });
}

RANKS_TEST("reduce_scatter leaves each rank the sum of its block", "[comm][quick]", 1, 2, 3, 4) {
  const auto collectives = group.collectives();
  for_each_case([&](at::ScalarType type, int64_t n) {
    const auto whole = n * group.world_size();
    const auto expected = sum_of_values(group.world_size(), whole, type).narrow(0, group.rank() * n, n);
    auto output = torch::full({n}, -1, type);
    collectives->reduce_scatter(output, values(group.rank(), whole, type), "a test").wait();
    EXPECT_EQUAL(output, expected, type, n);

    auto input = values(group.rank(), whole, type);
    auto own = input.narrow(0, group.rank() * n, n);
    collectives->reduce_scatter(own, input, "a test in place").wait();
    EXPECT_EQUAL(own, expected, type, n);
  });
}

RANKS_TEST("all_reduce sums over ranks", "[comm][quick]", 1, 2, 3, 4) {
  for_each_case([&](at::ScalarType type, int64_t n) {
    auto tensor = values(group.rank(), n, type);
    group.collectives()->all_reduce(tensor, "a test").wait();
    EXPECT_EQUAL(tensor, sum_of_values(group.world_size(), n, type), type, n);
  });
}

RANKS_TEST("broadcast spreads the root's values, from every root", "[comm][quick]", 1, 2, 3, 4) {
  for (int root = 0; root < group.world_size(); ++root)
    for_each_case([&](at::ScalarType type, int64_t n) {
      auto tensor = values(group.rank(), n, type);
      group.collectives()->broadcast(tensor, root, "a test").wait();
      EXPECT_EQUAL(tensor, values(root, n, type), type, n);
    });
}

RANKS_TEST("dtypes that Gloo does not know are gathered and broadcast as bytes", "[comm][quick]", 1, 2, 3) {
  for (const auto type : {at::kBool, at::kShort, at::kComplexFloat, at::kFloat8_e4m3fn}) {
    const auto bits = [&](int rank) { return (torch::arange(6) % 2 + rank % 2 * 0).to(at::kFloat).to(type); };
    auto output = torch::zeros({6 * group.world_size()}, at::kFloat).to(type);
    group.collectives()->all_gather(output, bits(group.rank()), "a test").wait();
    for (int rank = 0; rank < group.world_size(); ++rank)
      EXPECT_EQUAL(output.narrow(0, 6 * rank, 6).view(at::kByte), bits(rank).view(at::kByte), type, 6);
    auto tensor = group.rank() == 0 ? bits(1) : torch::zeros({6}, at::kFloat).to(type);
    group.collectives()->broadcast(tensor, 0, "a test").wait();
    EXPECT_EQUAL(tensor.view(at::kByte), bits(1).view(at::kByte), type, 6);
  }
}

RANKS_TEST("operations in flight together do not disturb each other, in whatever order they are waited for", "[comm][quick]", 1, 2, 3) {
  const auto collectives = group.collectives();
  const int world_size = group.world_size();
  auto gathered = torch::empty({1000 * world_size}), other = torch::empty({300 * world_size});
  auto scattered = torch::empty({1000}), summed = values(group.rank(), 7, at::kLong);
  Pending first = collectives->all_gather(gathered, values(group.rank(), 1000, at::kFloat), "first");
  Pending second = collectives->reduce_scatter(scattered, values(group.rank(), 1000 * world_size, at::kFloat), "second");
  Pending third = collectives->all_reduce(summed, "third");
  Pending fourth = collectives->all_gather(other, values(group.rank(), 300, at::kFloat), "fourth");
  third.wait();
  second.wait();
  fourth.wait();
  first.wait();
  EXPECT_EQUAL(gathered, all_values(world_size, 1000, at::kFloat), at::kFloat, 1000);
  EXPECT_EQUAL(other, all_values(world_size, 300, at::kFloat), at::kFloat, 300);
  EXPECT_EQUAL(scattered, sum_of_values(world_size, 1000 * world_size, at::kFloat).narrow(0, 1000 * group.rank(), 1000), at::kFloat, 1000);
  EXPECT_EQUAL(summed, sum_of_values(world_size, 7, at::kLong), at::kLong, 7);
}

RANKS_TEST("an operation that is dropped without waiting still takes part", "[comm][quick]", 1, 2, 3) {
  auto lost = values(group.rank(), 1000, at::kFloat);
  { Pending dropped = group.collectives()->all_reduce(lost, "dropped"); }
  auto kept = values(group.rank(), 1000, at::kFloat);
  group.collectives()->all_reduce(kept, "kept").wait();
  EXPECT_EQUAL(kept, sum_of_values(group.world_size(), 1000, at::kFloat), at::kFloat, 1000);
  group.barrier();  // after which `lost` is nobody's any more
}

RANKS_TEST("exchange returns every rank's text, of whatever length", "[comm][quick]", 1, 2, 3, 4) {
  for (int round = 0; round < 20; ++round) {
    const auto text = [&](int rank) { return std::string(rank * 1000 + round, 'a' + rank) + '\0' + std::to_string(rank); };
    const auto texts = group.collectives()->exchange("round " + std::to_string(round), text(group.rank()));
    EXPECT(texts.size() == static_cast<size_t>(group.world_size()), texts.size() << " texts");
    for (int rank = 0; rank < group.world_size(); ++rank)
      EXPECT(texts[rank] == text(rank), "rank " << rank << "'s text in round " << round << " arrived as '" << texts[rank] << "'");
  }
}
