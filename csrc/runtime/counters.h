// Counts collectives on their way to the seam. At world size 1 nothing is communicated, so nothing is counted.
#pragma once

#include <fsdp/stats.h>

#include <memory>
#include <string>
#include <utility>

#include "comm/collectives.h"

namespace fsdp {

class CountedCollectives {
 public:
  explicit CountedCollectives(std::shared_ptr<comm::Collectives> seam) : seam_(std::move(seam)) {}

  int rank() const { return seam_->rank(); }
  int world_size() const { return seam_->world_size(); }
  const CollectiveCounts& counts() const { return counts_; }
  comm::Collectives& seam() const { return *seam_; }

  comm::Pending all_gather(at::Tensor output, at::Tensor input, std::string purpose) {
    count(counts_.all_gather, output);
    return seam_->all_gather(std::move(output), std::move(input), std::move(purpose));
  }
  comm::Pending reduce_scatter(at::Tensor output, at::Tensor input, std::string purpose) {
    count(counts_.reduce_scatter, input);
    return seam_->reduce_scatter(std::move(output), std::move(input), std::move(purpose));
  }
  comm::Pending all_reduce(at::Tensor tensor, std::string purpose) {
    count(counts_.all_reduce, tensor);
    return seam_->all_reduce(std::move(tensor), std::move(purpose));
  }
  comm::Pending broadcast(at::Tensor tensor, int root, std::string purpose) {
    count(counts_.broadcast, tensor);
    return seam_->broadcast(std::move(tensor), root, std::move(purpose));
  }

 private:
  static void count(CollectiveCount& counter, const at::Tensor& whole) {
    ++counter.calls;
    counter.bytes += static_cast<int64_t>(whole.nbytes());
  }

  std::shared_ptr<comm::Collectives> seam_;
  CollectiveCounts counts_;
};

}  // namespace fsdp
