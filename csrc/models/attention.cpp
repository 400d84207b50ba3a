#include "models/attention.h"

#include <ATen/ops/gelu.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>

namespace fsdp::models {

at::Tensor causal_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, double dropout) {
  const int64_t rows = query.size(0), length = query.size(1), heads = query.size(2), kv_heads = key.size(2), dim = query.size(3);
  const auto spread = [&](const at::Tensor& x) {
    const auto by_head = x.transpose(1, 2);  // (B, kv_heads, T, D)
    if (heads == kv_heads) return by_head;
    return by_head.unsqueeze(2).expand({rows, kv_heads, heads / kv_heads, length, dim}).reshape({rows, heads, length, dim});
  };
  const auto mixed =
      at::scaled_dot_product_attention(query.transpose(1, 2), spread(key), spread(value), /*attn_mask=*/{}, dropout, /*is_causal=*/true);
  return mixed.transpose(1, 2).reshape({rows, length, heads * dim});
}

at::Tensor activate(Activation activation, const at::Tensor& x) {
  switch (activation) {
    case Activation::SILU:
      return at::silu(x);
    case Activation::GELU:
      return at::gelu(x);
    case Activation::GELU_TANH:
      return at::gelu(x, "tanh");
    case Activation::RELU:
      return at::relu(x);
  }
  TORCH_INTERNAL_ASSERT(false);
}

}  // namespace fsdp::models
