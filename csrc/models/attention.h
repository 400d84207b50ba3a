// What the decoders share.
#pragma once

#include <ATen/core/Tensor.h>

#include "models/model_config.h"

namespace fsdp::models {

// Causal attention. query (B, T, heads, D), key and value (B, T, kv_heads, D); each key head serves heads / kv_heads query heads that
// follow each other. Returns (B, T, heads · D).
at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout);

at::Tensor activate(Activation activation, const at::Tensor& x);

}  // namespace fsdp::models
