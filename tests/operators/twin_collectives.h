// Two ranks in one process: the process is rank 0, and its twin holds the same parameters and makes the same gradients.
//
// The library then does everything that it does among several ranks: shards that are not the parameter, memory that is gathered and
// freed, gradients that are divided and summed. Nothing is communicated, because all that the twin would say is known:
//   all_gather       the whole values, learned from the broadcast that every wrapping begins with
//   reduce_scatter   twice this rank's contribution
// Halving and doubling are exact, so a plain run is equalled bit by bit.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "comm/collectives.h"

namespace fsdp::testing {

class TwinCollectives : public comm::Collectives {
 public:
  int rank() const override { return 0; }
  int world_size() const override { return 2; }
  const std::string& backend() const override { return backend_; }
  void close() noexcept override {}

  // What the last reduce-scatter of a unit (by its title) summed up, all ranks' intervals; undefined when there was none.
  at::Tensor reduced(const std::string& unit_title) const;

 protected:
  std::unique_ptr<comm::Work> start(const comm::Request& request) override;
  std::vector<std::string> exchange_texts(const std::string&, const std::string& text) override { return {text, text}; }

 private:
  const std::string backend_ = "twin";
  std::map<std::string, at::Tensor> values_, reduced_;  // by the title of the unit
};

}  // namespace fsdp::testing
