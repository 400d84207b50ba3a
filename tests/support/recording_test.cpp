#include "support/ranks.h"
#include "support/recording_collectives.h"

#include <torch/torch.h>

RANKS_TEST("a recorded group does what the real one does, and writes it down in order", "[comm][quick]", 1, 2, 3) {
  using fsdp::testing::error_of;
  auto recorded = fsdp::testing::record(group);
  auto& seam = *recorded.group.collectives();
  const int n = group.world_size();
  EXPECT(recorded.group.rank() == group.rank() && recorded.group.backend() == group.backend(), "another place");

  auto whole = torch::empty({4 * n});
  auto gathering = seam.all_gather(whole, torch::full({4}, group.rank() + 1.f), "unit 'a', forward");
  auto sum = torch::ones({3}, at::kLong);
  seam.all_reduce(sum, "norm").wait();
  gathering.wait();
  auto own = torch::empty({4});
  seam.reduce_scatter(own, torch::ones({4 * n}), "unit 'a', backward").wait();
  recorded.group.barrier();
  const auto texts = seam.exchange("plan", "of rank " + std::to_string(group.rank()));

  EXPECT(whole[4 * n - 1].item<float>() == n && sum[0].item<int64_t>() == n && own[0].item<float>() == n, "wrong results");
  EXPECT(texts.back() == "of rank " + std::to_string(n - 1), texts.back());
  EXPECT(recorded.log->text() ==
             "all_gather unit 'a', forward\n"
             "all_reduce norm\n"
             "reduce_scatter unit 'a', backward\n"
             "barrier\n"
             "exchange plan\n",
         recorded.log->text());
  EXPECT(recorded.log->bytes("all_gather") == 16 * n && recorded.log->bytes("reduce_scatter") == 16 * n &&
             recorded.log->bytes("all_reduce") == 24,
         recorded.log->bytes("all_gather"));
  EXPECT(recorded.log->count("all_gather") == 1 && recorded.log->count("broadcast") == 0, "wrong counts");
}

RANKS_TEST("an error passes through a stand-in with its text, once", "[comm][quick]", 2) {
  fsdp::ProcessGroup other =
      fsdp::init_process_group({.timeout = std::chrono::seconds(10), .rendezvous_timeout = std::chrono::seconds(10)});
  auto recorded = fsdp::testing::record(other);
  recorded.group.close();
  const std::string error = fsdp::testing::error_of([&] { recorded.group.collectives()->all_reduce(torch::ones({1}), "norm").wait(); });
  EXPECT(error.starts_with("rank " + std::to_string(group.rank()) + " of 2: all_reduce (norm) failed after"), error);
  EXPECT(error.find("all_reduce", error.find("all_reduce") + 1) == std::string::npos, "described twice: " << error);
}
