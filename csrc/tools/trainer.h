// Trains the model of a configuration on the ranks of a group.
#pragma once

#include <fsdp/process_group.h>

#include <memory>

#include "tools/train_config.h"

namespace fsdp::tools {

class Trainer {
 public:
  // All ranks must call, with the same configuration. Mistakes that show now are thrown on all ranks.
  Trainer(const TrainConfig& config, ProcessGroup& group);
  ~Trainer();

  // All ranks must call. Rank 0 prints. Returns after max_steps, or on all ranks after the step during which one of them was told to stop
  // (request_stop). An error is one rank's; the others find it gone.
  void run();

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

// Asks for an end after the step under way. For signal handlers.
void request_stop() noexcept;

}  // namespace fsdp::tools
