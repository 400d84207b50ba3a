// Emptying and refilling a storage that tensors keep referring to.
//
// Autograd's saved tensors are views of a parameter's storage, so memory can only be freed and brought back *through* the storage
// object. An emptied storage answers every attempt to reach its data with our text instead of a null pointer.
#pragma once

#include <c10/core/StorageImpl.h>

#include <string>

namespace fsdp {

void empty_storage(c10::StorageImpl& storage, const std::string& error_on_access);
void fill_storage(c10::StorageImpl& storage, at::DataPtr memory, size_t bytes);

}  // namespace fsdp
