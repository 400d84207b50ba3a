#include "runtime/registry.h"

#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "runtime/flat_group.h"

namespace fsdp::registry {
namespace {

struct Table {
  std::shared_mutex mutex;
  std::unordered_map<const void*, TrackedTensor> by_address;  // TensorImpl of handles, StorageImpl of flat buffers
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

}  // namespace

void add(ShardedParameter& parameter, ShardedModel& model, Unit& unit) {
  insert(parameter.handle.unsafeGetTensorImpl(), {TrackedTensor::Kind::PARAMETER, &model, &unit, parameter.group, &parameter});
}

void add(const at::Tensor& flat, TrackedTensor::Kind kind, ShardedModel& model, Unit& unit, FlatGroup& group) {
  insert(flat.storage().unsafeGetStorageImpl(), {kind, &model, &unit, &group, nullptr});
}

void remove_all(const ShardedModel& model) {
  std::unique_lock lock(table().mutex);
  std::erase_if(table().by_address, [&](const auto& entry) { return entry.second.model == &model; });
}

std::optional<TrackedTensor> find(const at::Tensor& tensor) {
  std::shared_lock lock(table().mutex);
  const auto& by_address = table().by_address;
  auto found = by_address.find(tensor.unsafeGetTensorImpl());
  if (found == by_address.end() && tensor.has_storage()) found = by_address.find(tensor.storage().unsafeGetStorageImpl());
  if (found == by_address.end()) return std::nullopt;
  return found->second;
}

bool is_sharded(const at::Tensor& handle) {
  const auto entry = find(handle);
  return entry && entry->kind == TrackedTensor::Kind::PARAMETER;
}

}  // namespace fsdp::registry
