#include "runtime/registry.h"

#include <mutex>
#include <shared_mutex>
#include <typeinfo>
#include <unordered_map>

#include "runtime/access_key.h"
#include "runtime/flat_group.h"

namespace fsdp::registry {
namespace {

// What handles, gradients, and tensors computed from a parameter's slices carry with them, and hand on to their copies (detach, data); it
// may outlive the model.
struct Origin final : c10::BackendMeta {
  std::optional<TrackedTensor> tracked;  // none: the model is gone. Guarded by the table's mutex
};

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<const void*, TrackedTensor> by_address;  // TensorImpl of handles, StorageImpl of flat buffers
  std::unordered_map<const ShardedParameter*, c10::intrusive_ptr<Origin>> origins;
};

// Never destroyed: wrappers held by static objects may outlive any destruction order.
Table& table() {
  static auto* table = new Table;
  return *table;
}

void insert(const void* address, const TrackedTensor& entry) {
  std::unique_lock lock(table().mutex);
  table().by_address.insert_or_assign(address, entry);
}

// REQUIRES: the table's mutex.
const std::optional<TrackedTensor>& origin_of(const at::Tensor& tensor) {
  static const std::optional<TrackedTensor> kNone;
  const auto* meta = tensor.unsafeGetTensorImpl()->get_backend_meta();
  return meta && typeid(*meta) == typeid(Origin) ? static_cast<const Origin*>(meta)->tracked : kNone;
}

// Addresses decide: what came into tracked memory by set_data may still carry another origin. REQUIRES: the table's mutex.
std::optional<TrackedTensor> find_locked(const at::Tensor& tensor) {
  const auto& by_address = table().by_address;
  auto found = by_address.find(tensor.unsafeGetTensorImpl());
  if (found != by_address.end()) return found->second;
  if (tensor.has_storage()) found = by_address.find(tensor.storage().unsafeGetStorageImpl());
  if (found == by_address.end()) return origin_of(tensor);
  auto tracked = found->second;
  const bool is_slice = tracked.kind == TrackedTensor::Kind::SHARD || tracked.kind == TrackedTensor::Kind::GRADIENT;
  if (is_slice && origin_of(tensor)) tracked.parameter = origin_of(tensor)->parameter;
  return tracked;
}

// LibTorch gives a tensor its keys when it is made, and no public way to add one.
struct Keys : c10::TensorImpl {
  static void add(c10::TensorImpl& tensor, c10::DispatchKey key) {
    constexpr auto keys = &Keys::key_set_;
    tensor.*keys = (tensor.*keys).add(key);
  }
};

}  // namespace

void add(ShardedParameter& parameter, ShardedModel& model, Unit& unit) {
  if (parameter.group->replicated)
    return insert(parameter.handle.unsafeGetTensorImpl(), {TrackedTensor::Kind::REPLICATED, &model, &unit, parameter.group, &parameter});
  insert(parameter.handle.unsafeGetTensorImpl(), {TrackedTensor::Kind::PARAMETER, &model, &unit, parameter.group, &parameter});
  auto origin = c10::make_intrusive<Origin>();
  origin->tracked = TrackedTensor{TrackedTensor::Kind::DERIVED, &model, &unit, parameter.group, &parameter};
  parameter.handle.unsafeGetTensorImpl()->set_backend_meta(origin);
  parameter.gradient_slice.unsafeGetTensorImpl()->set_backend_meta(origin);
  std::unique_lock lock(table().mutex);
  table().origins.insert_or_assign(&parameter, std::move(origin));
}

void add(const at::Tensor& flat, TrackedTensor::Kind kind, ShardedModel& model, Unit& unit, FlatGroup& group) {
  insert(flat.storage().unsafeGetStorageImpl(), {kind, &model, &unit, &group, nullptr});
}

void remove_all(const ShardedModel& model) {
  std::unique_lock lock(table().mutex);
  std::erase_if(table().by_address, [&](const auto& entry) { return entry.second.model == &model; });
  std::erase_if(table().origins, [&](const auto& entry) {
    const bool removed = entry.second->tracked->model == &model;
    if (removed) entry.second->tracked.reset();
    return removed;
  });
}

void add_access_key(const at::Tensor& tensor) {
  auto& impl = *tensor.unsafeGetTensorImpl();
  if (!impl.key_set().has(kAccessKey)) Keys::add(impl, kAccessKey);
}

std::optional<TrackedTensor> find(const at::Tensor& tensor) {
  std::shared_lock lock(table().mutex);
  return find_locked(tensor);
}

void mark_derived(const at::Tensor& tensor, const ShardedParameter& origin) {
  std::shared_lock lock(table().mutex);
  auto& impl = *tensor.unsafeGetTensorImpl();
  const auto tracked = find_locked(tensor);
  const bool has_name = tracked && tracked->parameter;
  add_access_key(tensor);
  if (has_name) return;
  const auto found = table().origins.find(&origin);
  if (found != table().origins.end()) impl.set_backend_meta(found->second);
}

bool is_sharded(const at::Tensor& handle) {
  const auto entry = find(handle);
  return entry && (entry->kind == TrackedTensor::Kind::PARAMETER || entry->kind == TrackedTensor::Kind::REPLICATED);
}

}  // namespace fsdp::registry
