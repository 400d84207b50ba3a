/// A model's weights in Hugging Face's layout: a folder with model.safetensors, or with several files and model.safetensors.index.json.
///
///     fsdp::load_weights(model, "SmolLM2-135M", {.skip = fsdp::name_contains("lora_")});
///     fsdp::save_weights(model, "out", {.dtype = torch::kBFloat16});
///
/// Works on a plain module and on a wrapped one, at any world size and with any strategy: names, shapes and values are those of the plain
/// module. Loading, each rank reads the bytes of its own slices only; saving, one flat group at a time is whole. On a wrapped model all
/// ranks must call, between steps, and see the same files; rank 0 writes.
///
/// Buffers belong to the weights. A tensor registered under several names is saved under the first, and loaded from whichever of them the
/// files have.
///
/// Thread safety: as the model's. Errors are c10::Error, on all ranks.
#pragma once

#include <fsdp/export.h>
#include <fsdp/parameter_predicate.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

class FullyShardedBase;

struct LoadWeightsOptions {
  /// What the model and the files have apart from each other: true: an error with the complete list; false: left alone. Shapes and kinds of
  /// dtype (floating or not) must always fit.
  bool strict = true;
  /// From a name in the model to the name in the files. Empty: the same.
  std::function<std::string(std::string_view name)> rename = {};
  /// Names in the model that are not asked for, such as adapters'.
  ParameterPredicate skip = {};
  /// Names in the files that are passed over.
  ParameterPredicate ignore = {};
};

/// `path`: such a folder, or one .safetensors file. Values are converted to the parameters' dtypes. Nothing is changed unless everything
/// fits; a file that cannot be read after that (a failing disk) leaves the model partly loaded, and says so.
FSDP_API void load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options = {});
FSDP_API void load_weights(FullyShardedBase& model, const std::string& path, const LoadWeightsOptions& options = {});

struct SaveWeightsOptions {
  std::optional<c10::ScalarType> dtype = std::nullopt;  ///< of floating tensors; none: as they are kept
  int64_t max_file_bytes = 5'000'000'000;               ///< more goes into several files of a folder
  /// From a name in the model to the name in the files. Empty: the same.
  std::function<std::string(std::string_view name)> rename = {};
  ParameterPredicate skip = {};  ///< names in the model that are not saved
};

/// `path`: a folder, made where there is none, or a name that ends in .safetensors for one file. Files appear under their names when they
/// are whole and on the disk, the index last.
FSDP_API void save_weights(const torch::nn::Module& module, const std::string& path, const SaveWeightsOptions& options = {});
FSDP_API void save_weights(const FullyShardedBase& model, const std::string& path, const SaveWeightsOptions& options = {});

/// On rank 0 every parameter, whole, and every buffer, in memory of their own; on the others nothing. All ranks must call.
FSDP_API std::vector<std::pair<std::string, at::Tensor>> full_state_dict(const FullyShardedBase& model);

}  // namespace fsdp
