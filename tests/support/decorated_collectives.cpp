#include "support/decorated_collectives.h"

namespace fsdp::testing {

namespace {

using comm::Operation;

class Passed final : public comm::Work {
 public:
  explicit Passed(comm::Pending pending) : pending_(std::move(pending)) {}
  void wait() override { pending_.wait(); }

 private:
  comm::Pending pending_;
};

// The seam's barrier waits; start() must not.
class PassedBarrier final : public comm::Work {
 public:
  explicit PassedBarrier(std::shared_ptr<comm::Collectives> inner) : inner_(std::move(inner)) {}
  void wait() override { inner_->barrier(); }

 private:
  const std::shared_ptr<comm::Collectives> inner_;
};

comm::Pending pass(comm::Collectives& inner, const comm::Request& request) {
  switch (request.operation) {
    case Operation::ALL_GATHER:
      return inner.all_gather(request.output, request.input, request.purpose);
    case Operation::REDUCE_SCATTER:
      return inner.reduce_scatter(request.output, request.input, request.purpose);
    case Operation::ALL_REDUCE:
      return inner.all_reduce(request.output, request.purpose);
    case Operation::BROADCAST:
      return inner.broadcast(request.output, request.root, request.purpose);
    case Operation::BARRIER:
      break;
  }
  throw std::logic_error("an operation that is not passed on");
}

}  // namespace

std::unique_ptr<comm::Work> DecoratedCollectives::start(const comm::Request& request) {
  if (request.operation == Operation::BARRIER) return std::make_unique<PassedBarrier>(inner_);
  return std::make_unique<Passed>(pass(*inner_, request));
}

std::vector<std::string> DecoratedCollectives::exchange_texts(const std::string& topic, const std::string& text) {
  return inner_->exchange(topic, text);
}

}  // namespace fsdp::testing
