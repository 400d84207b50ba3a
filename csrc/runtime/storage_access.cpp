#include "runtime/storage_access.h"

#include <utility>

namespace fsdp {
namespace {

// StorageImpl can be told publicly to throw on access, but not to stop doing so. An explicit instantiation may name a private
// member; this one hands out the pointer to the flag.
using ThrowFlag = bool c10::StorageImpl::*;
ThrowFlag throw_flag();
template <ThrowFlag Flag>
struct ThrowFlagAccess {
  friend ThrowFlag throw_flag() { return Flag; }
};
template struct ThrowFlagAccess<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

void empty_storage(c10::StorageImpl& storage, const std::string& error_on_access) {
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, storage.device()));
  storage.set_nbytes(0);
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(error_on_access);
}

void fill_storage(c10::StorageImpl& storage, at::DataPtr memory, size_t bytes) {
  storage.*throw_flag() = false;
  storage.set_data_ptr_noswap(std::move(memory));  // after the flag: it also refreshes the combined check that guards access
  storage.set_nbytes(bytes);
}

}  // namespace fsdp
