// The optimizer that a configuration names, over a wrapped model, with the loss scale where it computes in fp16.
#pragma once

#include <ATen/core/Tensor.h>
#include <fsdp/adamw.h>
#include <fsdp/checkpoint.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/grad_scaler.h>
#include <torch/optim/sgd.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <variant>

#include "tools/train_config.h"

namespace fsdp::tools {

class TrainOptimizer {
 public:
  // Throws c10::Error also when a pattern of no_decay takes no parameter.
  TrainOptimizer(const FullyShardedBase& model, const TrainConfig& config);

  at::Tensor scale(const at::Tensor& loss) const { return scaler_ ? scaler_->scale(loss) : loss; }
  void unscale();        // before gradients are looked at
  void step(double lr);  // all ranks; none is made where a gradient overflowed in fp16
  CheckpointOptimizer checkpointed();
  nlohmann::json state() const;  // beside what the optimizer keeps: of the loss scale
  void load_state(const nlohmann::json& state);
  double loss_scale() const { return scaler_ ? scaler_->get_scale() : 1; }

 private:
  void hold_scale(double before);

  std::variant<AdamW, Adam, torch::optim::SGD> optimizer_;
  std::optional<GradScaler> scaler_;
  LossScaleConfig scale_config_;
  int64_t hysteresis_left_;
};

}  // namespace fsdp::tools
