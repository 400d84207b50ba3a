#include "operators/twin_collectives.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <cstring>

namespace fsdp::testing {
namespace {

class Done final : public comm::Work {
 public:
  void wait() override {}
};

// Purposes read "unit 't0', forward".
std::string title_in(const std::string& purpose) { return purpose.substr(0, purpose.rfind(", ")); }

}  // namespace

at::Tensor TwinCollectives::reduced(const std::string& unit_title) const {
  const auto found = reduced_.find(unit_title);
  return found == reduced_.end() ? at::Tensor() : found->second;
}

std::unique_ptr<comm::Work> TwinCollectives::start(const comm::Request& request) {
  const at::NoGradGuard no_grad;
  const auto title = title_in(request.purpose);
  at::Tensor output = request.output;
  switch (request.operation) {
    case comm::Operation::BROADCAST:
      values_[title] = output.clone();
      break;
    case comm::Operation::ALL_GATHER: {
      const auto known = values_.find(title);
      TORCH_CHECK(known != values_.end() && known->second.numel() == output.numel(), "the twin does not know the values of ",
                  request.purpose);
      TORCH_CHECK(std::memcmp(known->second.const_data_ptr(), request.input.const_data_ptr(), request.input.nbytes()) == 0,
                  "this rank's shard is no longer what its twin holds: ", request.purpose);
      output.copy_(known->second);
      break;
    }
    case comm::Operation::REDUCE_SCATTER: {
      auto sum = request.input + request.input;
      output.copy_(sum.narrow(0, 0, output.numel()));
      reduced_[title] = std::move(sum);
      break;
    }
    case comm::Operation::ALL_REDUCE:
      output.add_(output.clone());
      break;
    case comm::Operation::BARRIER:
      break;
  }
  return std::make_unique<Done>();
}

}  // namespace fsdp::testing
