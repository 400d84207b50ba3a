// A seam stand-in passes everything on to a group inside, and does something of its own besides. Derive from it, override start() or
// exchange_texts(), and call the base's where the real thing is to happen.
#pragma once

#include "comm/collectives.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace fsdp::testing {

class DecoratedCollectives : public comm::Collectives {
 public:
  explicit DecoratedCollectives(std::shared_ptr<comm::Collectives> inner) : inner_(std::move(inner)) {}
  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const std::string& backend() const override { return inner_->backend(); }
  void close() noexcept override { inner_->close(); }
  void check_always() override { inner_->check_always(); }

 protected:
  std::unique_ptr<comm::Work> start(const comm::Request& request) override;
  std::vector<std::string> exchange_texts(const std::string& topic, const std::string& text) override;

 private:
  const std::shared_ptr<comm::Collectives> inner_;
};

}  // namespace fsdp::testing
