/// Checkpoints of a training run: saved at one world size and strategy, loaded at any other.
///
///     fsdp::save_checkpoint("run", step, model, optimizer, extra_json, {.keep_last = 3});
///     ...
///     if (const auto loaded = fsdp::load_checkpoint("run", model, optimizer)) step = loaded->step;
///
/// A checkpoint is a folder run/step-00000042 with one safetensors file per rank, the rank's slices of parameters and optimizer state, its
/// buffers and its random generator, and manifest.json, which says what lies where and carries a hash of every byte
/// (docs/design/checkpoint_format.md). It appears under its name when all of it is on the disk: a save that is interrupted, by whatever,
/// leaves the checkpoints before it as they were.
///
/// All ranks must call these, between steps, and see the same folder. Errors are c10::Error, on all ranks; before anything changes where
/// not said otherwise. Thread safety: as the model's.
#pragma once

#include <fsdp/adamw.h>
#include <fsdp/export.h>
#include <fsdp/parameter_predicate.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace torch::optim {
class Optimizer;
}

namespace fsdp {

class FullyShardedBase;
class OptimizerAccess;

/// The optimizer whose state is saved and loaded. Refers to it: use it as an argument only.
class FSDP_API CheckpointOptimizer {
 public:
  CheckpointOptimizer() = default;  ///< none
  CheckpointOptimizer(AdamW& optimizer);
  CheckpointOptimizer(Adam& optimizer);
  CheckpointOptimizer(torch::optim::Optimizer& optimizer);  ///< SGD, Adam, AdamW, RMSprop or Adagrad; of the options the lr only
  OptimizerAccess* access() const { return access_.get(); }

 private:
  std::shared_ptr<OptimizerAccess> access_;
};

struct SaveCheckpointOptions {
  int64_t keep_last = 0;   ///< older ones are deleted, once the new one is on the disk; 0: none is
  int64_t keep_every = 0;  ///< but for those whose step is a multiple of this; 0: no such
};

/// Saves under `root`, which is made where there is none, and returns the checkpoint's path. One of the same step is replaced. `extra` is
/// the user's own text, rank 0's is kept. Throws where a file cannot be written (path, bytes wanted and free); nothing is left under the
/// checkpoint's name, and the next save works.
FSDP_API std::string save_checkpoint(const std::string& root, int64_t step, const FullyShardedBase& model,
                                     const CheckpointOptimizer& optimizer = {}, const std::string& extra = "",
                                     const SaveCheckpointOptions& options = {});

struct LoadCheckpointOptions {
  /// True: model and checkpoint must have the same parameters, buffers and optimizer state; false: what only one of them has is left alone.
  bool strict = true;
  /// Names of parameters, and of optimizer state with them, that are not asked for.
  ParameterPredicate skip = {};
  /// Where `path` holds several: after one that is damaged or does not fit, the one before it.
  bool fall_back = false;
};

struct LoadedCheckpoint {
  std::string path;
  int64_t step = 0;
  std::string extra;
  int world_size = 0;  ///< of the run that saved it
};

/// `path`: a checkpoint, or a folder of them, of which the newest is taken; nothing where it holds none. Every byte that is used is
/// compared with its hash first. The random generator goes on as it was at the same world size; at another it is seeded from the saved seed
/// and the rank, and buffers are rank 0's. What a disk no longer reads after that leaves the model partly loaded, and says so.
FSDP_API std::optional<LoadedCheckpoint> load_checkpoint(const std::string& path, FullyShardedBase& model,
                                                         const CheckpointOptimizer& optimizer = {},
                                                         const LoadCheckpointOptions& options = {});

}  // namespace fsdp
