// The optimizer that a configuration names, over a wrapped model.
#pragma once

#include <fsdp/adamw.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <torch/optim/sgd.h>

#include <variant>

#include "tools/train_config.h"

namespace fsdp::tools {

class TrainOptimizer {
 public:
  // Throws c10::Error also when a pattern of no_decay takes no parameter.
  TrainOptimizer(const FullyShardedBase& model, const OptimizerConfig& config);

  void step(double lr);  // all ranks

 private:
  std::variant<AdamW, Adam, torch::optim::SGD> optimizer_;
};

}  // namespace fsdp::tools
