// The moments of those parameters of one flat group that one parameter group of an optimizer has, and the lists that a fused kernel wants.
//
// Vocabulary: a run is a stretch of the shard whose parameters are neighbours, all have a gradient, and have been stepped equally often.
// The moments repeat the shard's stretches one behind the other, padding within them included, so that a run is one piece of each. In the
// steady state the lists are those of the step before: they are made anew only when other parameters have gradients.
//
// Thread safety: one thread at a time.
#pragma once

#include <fsdp/adamw.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "runtime/flat_views.h"

namespace fsdp {

class FlatMoments {
 public:
  // parameters: those of the group that belong to it, by index, rising. `group` must outlive this.
  FlatMoments(const FlatGroupView& group, const std::vector<size_t>& parameters);

  // What a fused kernel takes, run by run, all lists of one length; real, contiguous, in the moments' dtype. `steps` counts the step to be
  // made.
  struct Runs {
    std::vector<at::Tensor> parameters, gradients, exp_avgs, exp_avg_sqs, steps;
  };

  // For the parameters that have a gradient now; their steps count one more. Makes the moments (zeros) when first asked with one.
  const Runs& begin_step();
  // Brings what the kernel wrote to the shard. Returns the parameters that were stepped, empty slices included: alike on all ranks.
  const std::vector<size_t>& end_step();

  void zero_grad();
  void add_state(std::vector<AdamState>& states) const;       // of parameters that have been stepped
  void add_names(std::set<std::string>& names) const;         // of all
  void restore(const std::map<std::string, int64_t>& steps);  // moments become zero

 private:
  struct Member {
    size_t parameter = 0;
    int64_t begin = 0;  // in the moments
    int64_t step = 0;
  };

  void allocate();
  void make_runs(const std::vector<bool>& with_gradient);

  const FlatGroupView& group_;
  std::vector<Member> members_;
  std::vector<int64_t> member_of_;  // by parameter, -1: not this group's
  int64_t moments_numel_ = 0;
  at::Tensor exp_avg_, exp_avg_sq_;  // (moments_numel_)

  std::vector<bool> with_gradient_;  // by member; what runs_ was made for
  std::vector<size_t> stepped_;      // parameters
  std::vector<at::Tensor> shard_runs_, gradient_runs_;
  Runs runs_;
};

}  // namespace fsdp
