/// What wrapping decided: which parameters form which unit, and where they lie. A value: printable, comparable, the same on all ranks.
///
///     std::cout << model.plan().to_string();
///
/// Vocabulary: a *unit* is gathered and freed as a whole. Its parameters of equal dtype and trainability form a *flat group*,
/// one flat buffer of which each rank owns a contiguous 1/N, its *shard*.
#pragma once

#include <fsdp/export.h>

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

struct PlannedParameter {
  std::string name;                      ///< as in named_parameters() of the unwrapped model
  std::vector<std::string> other_names;  ///< further names of the same tensor (tied weights, a module registered twice)
  std::vector<int64_t> shape;            ///< of the whole parameter
  int64_t numel = 0;                     ///< elements of the whole parameter
  int64_t offset = 0;                    ///< first element in the group's unsharded buffer
};

struct PlannedGroup {
  c10::ScalarType dtype = c10::ScalarType::Float;          ///< of the shard (master)
  c10::ScalarType compute_dtype = c10::ScalarType::Float;  ///< of the unsharded buffer
  c10::ScalarType reduce_dtype = c10::ScalarType::Float;   ///< that gradients are summed up in
  bool trainable = true;                                   ///< requires_grad when the model was wrapped
  bool keeps_master = true;                                ///< false: frozen, kept in compute_dtype only
  bool kept_wide = false;                                  ///< wider than the model's param_dtype by choice
  bool replicated = false;                                 ///< whole on every rank
  std::vector<PlannedParameter> parameters;
  int64_t shard_numel = 0;   ///< elements per rank, padding included; all of them where replicated
  int64_t counts_numel = 0;  ///< numbers behind each rank's interval of the gradient buffer

  FSDP_API int64_t numel() const;  ///< elements of its parameters, without padding
};

struct PlannedUnit {
  std::string name;  ///< path of its module; empty for the root unit
  std::vector<PlannedGroup> groups;

  FSDP_API int64_t unsharded_bytes(int world_size) const;  ///< of its buffers while it is gathered, padding included
};

struct Plan {
  int world_size = 1;
  int64_t max_unsharded_bytes = 0;  ///< what gathered units may take at once; 0: not decided
  std::vector<PlannedUnit> units;   ///< the root unit first, then in order of registration; units without parameters are left out

  FSDP_API int64_t numel() const;            ///< elements of all parameters, each tensor once
  FSDP_API int64_t shard_bytes() const;      ///< parameter bytes that each rank keeps
  FSDP_API int64_t unsharded_bytes() const;  ///< bytes of all unsharded buffers together
  FSDP_API std::string to_string() const;    ///< a table: unit, parameters, elements, dtype, bytes per rank, share of the whole
};

}  // namespace fsdp
