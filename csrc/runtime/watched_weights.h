// Weights whose products somebody adds to: how an adapter reaches a Linear that knows nothing of it.
//
// A watched weight carries the access key, sharded or not, so the access hook sees the products x · Wᵀ (linear, and matmul, mm and addmm
// with the transposed weight) that are made with it, or x · W where the weight is kept (in, out), and asks the observer what their result
// shall be. Only products of forward and of recomputations count: those of backward read the weight the other way round or build no graph.
//
// Thread safety: any thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/function_schema.h>
#include <ATen/core/stack.h>

#include <memory>
#include <optional>

namespace fsdp {

class ProductObserver {
 public:
  virtual ~ProductObserver() = default;
  // `output` is the product of `input` with the weight; returns what the caller of the operator gets. Recorded by autograd.
  virtual at::Tensor after_product(const at::Tensor& input, const at::Tensor& output) = 0;
};

namespace watched_weights {

// `weight` (the handle that the module holds): (out, in), or (in, out) where fan_in_first. Lasts as long as the tensor. REQUIRES: not
// watched yet.
void watch(const at::Tensor& weight, std::shared_ptr<ProductObserver> observer, int64_t in, int64_t out, bool fan_in_first);

// Null where nobody watches.
std::shared_ptr<ProductObserver> observer_of(const at::Tensor& weight);

// To be called after set_data gave a handle the content and the keys of another tensor. Does nothing for one that is not watched.
void keep_watching(const at::Tensor& handle);

struct Product {
  std::shared_ptr<ProductObserver> observer;
  at::Tensor input;
};

// Whether an operator about to run is such a product; none inside another one (WithinProduct).
std::optional<Product> product_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

class WithinProduct {
 public:
  WithinProduct();
  ~WithinProduct();
  WithinProduct(const WithinProduct&) = delete;
  WithinProduct& operator=(const WithinProduct&) = delete;
};

}  // namespace watched_weights
}  // namespace fsdp
