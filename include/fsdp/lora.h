/// LoRA: small trainable matrices beside the frozen ones of an existing model, which is not edited.
///
///     auto adapters = fsdp::lora::attach(*net, {.r = 8, .alpha = 16, .target_modules = {"q_proj", "v_proj"}});
///     fsdp::FullyShardedDataParallel model(net, group, {
///         .auto_wrap_policy = ..., .mixed_precision = {.param_dtype = torch::kBFloat16}, .unsharded = fsdp::name_contains("lora_")});
///
/// A target's product y = x Wᵀ (+ bias) becomes y + s · dropout(x) Aᵀ Bᵀ, with A (r, in) and B (out, r) registered in the target itself as
/// `lora_A` and `lora_B`, and s = alpha / r, or alpha / sqrt(r) where rank_stabilized. It is computed in the adapter's dtype and returned
/// in y's. A starts uniform in ±1/sqrt(in), B at zero, so attaching changes no output. Source: Hu et al., "LoRA", arXiv:2106.09685;
/// Kalajdzievski, "Rank stabilization", arXiv:2312.03732.
///
/// Works on a plain module, wrapped later or never, and on a wrapped model, where the adapters are whole on every rank and start from rank
/// 0's values. Every product of forward that reads the target's weight counts (torch::linear, and matmul, mm and addmm with it), also where
/// the module itself is not called, as MultiheadAttention does with its out_proj.
///
/// Thread safety: one thread at a time per model. Errors are c10::Error, before anything changes.
#pragma once

#include <fsdp/export.h>

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace fsdp {

class FullyShardedBase;

namespace lora {

struct LoraOptions {
  int64_t r = 8;
  double alpha = 16;
  double dropout = 0;  ///< of the adapter's input, while the target trains

  /// Ends of module paths: "q_proj" means every module whose path is q_proj or ends in .q_proj. "all-linear": every torch::nn::Linear but
  /// one named lm_head. A target is a Linear, or any other module with a parameter `weight` of two dimensions that it multiplies by.
  std::vector<std::string> target_modules = {"all-linear"};

  bool rank_stabilized = false;

  /// For targets that are no torch::nn::Linear: their weight is (in, out), as GPT-2's is.
  bool fan_in_fan_out = false;

  c10::ScalarType dtype = c10::ScalarType::Float;  ///< of the adapter
};

/// Attaches adapters, freezes every other parameter of the module, and returns the adapters' parameters, A before B, in the order of the
/// module tree. Throws when nothing matches (naming what could have), when a target is of another kind, has an adapter already, or shares
/// its weight with another module, and when the module's parameters are sharded (attach to the wrapper).
FSDP_API std::vector<at::Tensor> attach(torch::nn::Module& module, const LoraOptions& options = {});

/// The same for a wrapped model, between steps. All ranks must call, with the same options. Build optimizers afterwards.
FSDP_API std::vector<at::Tensor> attach(FullyShardedBase& model, const LoraOptions& options = {});

/// Adds s · B A to the weights; the adapters add nothing more until unmerge() takes it away again. In a narrow dtype the weights keep the
/// rounding of both. On a wrapped model all ranks must call, between steps; each writes its own slice. Throws where nothing is attached,
/// and where some are merged already (not yet merged).
FSDP_API void merge(torch::nn::Module& module);
FSDP_API void merge(FullyShardedBase& model);
FSDP_API void unmerge(torch::nn::Module& module);
FSDP_API void unmerge(FullyShardedBase& model);

/// Adapters in PEFT's layout: a folder with adapter_config.json and adapter_model.safetensors, which PEFT reads, and the other way round.
/// They are complete, whatever the strategy: sharded adapters are gathered, whole ones communicate nothing. On a wrapped model all ranks
/// must call, between steps, and see the same files; rank 0 writes. save_adapter throws where adapters were attached with different r,
/// alpha, dropout, rank_stabilized or fan_in_fan_out. load_adapter fills adapters that are attached; throws, before anything changes, where
/// none are, some are merged, or the folder's r, alpha or rank_stabilized, names or shapes are others.
FSDP_API void save_adapter(const torch::nn::Module& module, const std::string& folder);
FSDP_API void save_adapter(const FullyShardedBase& model, const std::string& folder);
FSDP_API void load_adapter(torch::nn::Module& module, const std::string& folder);
FSDP_API void load_adapter(FullyShardedBase& model, const std::string& folder);

/// What a folder's adapter was made with, for attach(). Throws for what this library does not compute: another PEFT method, DoRA, biases
/// that train, ranks by module, layers chosen by number, target_modules as a regular expression.
FSDP_API LoraOptions read_options(const std::string& folder);

/// "442,368 of 134,957,376 parameters train (0.33 %), in 60 adapters".
FSDP_API std::string trainable_report(const torch::nn::Module& module);
FSDP_API std::string trainable_report(const FullyShardedBase& model);

}  // namespace lora
}  // namespace fsdp
