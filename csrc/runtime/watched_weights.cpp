#include "runtime/watched_weights.h"

#include <c10/core/GradMode.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/graph_task.h>

#include <atomic>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "runtime/access_key.h"
#include "runtime/flat_group.h"
#include "runtime/registry.h"

namespace fsdp::watched_weights {
namespace {

// The weak reference keeps the address from being used again.
struct Watched {
  c10::weak_intrusive_ptr<c10::TensorImpl> weight;
  std::shared_ptr<ProductObserver> observer;
  int64_t in, out;
  bool fan_in_first;
};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<const c10::TensorImpl*, Watched> by_handle;
  std::atomic<bool> used{false};
};

Table& table() {
  static auto* table = new Table;  // as the registry's
  return *table;
}

thread_local int products_under_way = 0;

// The watched handle that `tensor` is, or is a view of.
const c10::TensorImpl* handle_behind(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto& by_handle = table().by_handle;
  if (by_handle.contains(impl)) return impl;
  if (const auto tracked = registry::find(tensor); tracked && tracked->kind == TrackedTensor::Kind::UNSHARDED) {
    for (const auto* parameter : tracked->group->parameters_under(tensor)) {
      const auto* handle = parameter->handle.unsafeGetTensorImpl();
      if (by_handle.contains(handle)) return handle;
    }
    return nullptr;
  }
  if (!tensor.has_storage()) return nullptr;
  for (const auto& [handle, watched] : by_handle)
    if (!watched.weight.expired() && handle->has_storage() &&
        handle->unsafe_storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl())
      return handle;
  return nullptr;
}

// Whether `factor`, in a product x · factor, is the weight as forward multiplies by it, and not as backward does.
bool is_forward_factor(const at::Tensor& factor, const Watched& watched) {
  if (factor.sizes() != at::IntArrayRef({watched.in, watched.out})) return false;
  const bool is_transposed = factor.stride(0) == 1;  // of a square matrix only the strides tell
  return watched.in != watched.out || watched.in == 1 || is_transposed != watched.fan_in_first;
}

}  // namespace

void watch(const at::Tensor& weight, std::shared_ptr<ProductObserver> observer, int64_t in, int64_t out, bool fan_in_first) {
  registry::add_access_key(weight);
  std::unique_lock lock(table().mutex);
  std::erase_if(table().by_handle, [](const auto& entry) { return entry.second.weight.expired(); });
  table().by_handle.emplace(weight.unsafeGetTensorImpl(), Watched{c10::weak_intrusive_ptr<c10::TensorImpl>(weight.getIntrusivePtr()),
                                                                  std::move(observer), in, out, fan_in_first});
  table().used = true;
}

std::shared_ptr<ProductObserver> observer_of(const at::Tensor& weight) {
  if (!table().used) return nullptr;
  std::shared_lock lock(table().mutex);
  const auto found = table().by_handle.find(weight.unsafeGetTensorImpl());
  return found == table().by_handle.end() ? nullptr : found->second.observer;
}

void keep_watching(const at::Tensor& handle) {
  if (observer_of(handle)) registry::add_access_key(handle);
}

std::optional<Product> product_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  if (!table().used || products_under_way > 0) return std::nullopt;
  if (torch::autograd::get_current_graph_task_id() >= 0 && !c10::GradMode::is_enabled()) return std::nullopt;
  const std::string_view name = schema.name();
  const bool is_linear = name == "aten::linear", is_addmm = name == "aten::addmm";
  if (!(is_linear || is_addmm || name == "aten::matmul" || name == "aten::mm") || !schema.overload_name().empty()) return std::nullopt;
  const auto* arguments = &stack[stack.size() - schema.arguments().size()];
  const auto& input = arguments[is_addmm ? 1 : 0].toTensor();
  const auto& factor = arguments[is_addmm ? 2 : 1].toTensor();
  if (!factor.defined() || !factor.key_set().has(kAccessKey)) return std::nullopt;
  std::shared_lock lock(table().mutex);
  const auto* handle = handle_behind(factor);
  if (!handle) return std::nullopt;
  const auto& watched = table().by_handle.at(handle);
  // linear transposes its weight itself; a handle of a sharded model may be a slice at the moment, whose kernel gets the whole.
  const bool is_handle = handle == factor.unsafeGetTensorImpl();
  const bool is_forward = is_linear ? !watched.fan_in_first : is_handle ? watched.fan_in_first : is_forward_factor(factor, watched);
  if (!is_forward) return std::nullopt;
  TORCH_CHECK(!is_addmm || arguments[4].toScalar().equal(1), "addmm with alpha = ", arguments[4],
              " multiplies by a weight that has an adapter; expected alpha = 1. Scale the result instead");
  return Product{watched.observer, input};
}

WithinProduct::WithinProduct() { ++products_under_way; }
WithinProduct::~WithinProduct() { --products_under_way; }

}  // namespace fsdp::watched_weights
