#include "runtime/flat_group.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <numeric>

#include "plan/planner.h"
#include "runtime/access_key.h"
#include "runtime/gradient_sink.h"
#include "runtime/storage_access.h"

namespace fsdp {
namespace {

// A tensor on `flat`'s storage, made without autograd's knowledge: to autograd it is no view.
at::Tensor view_with_keys(const at::Tensor& flat, c10::DispatchKeySet keys, at::IntArrayRef sizes, at::IntArrayRef strides,
                          int64_t offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(flat.storage()), keys, flat.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return view;
}

// One that carries the access key.
at::Tensor keyed_view(const at::Tensor& flat, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  return view_with_keys(flat, flat.key_set().add(kAccessKey), sizes, strides, offset);
}

at::Tensor keyed_slice(const at::Tensor& flat, const ShardSlice& slice) {
  return keyed_view(flat, {slice.length}, {1}, slice.begin_in_shard);
}

c10::StorageImpl& storage_of(const at::Tensor& flat) { return *flat.storage().unsafeGetStorageImpl(); }

std::vector<int64_t> numels_of(const std::vector<at::Tensor>& tensors) {
  std::vector<int64_t> numels;
  for (const auto& tensor : tensors) numels.push_back(tensor.numel());
  return numels;
}

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size(); d-- > 1;) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return strides;
}

}  // namespace

at::Tensor ShardedParameter::in_memory_order(const at::Tensor& tensor) const {
  return (memory_order.empty() ? tensor : tensor.permute(memory_order)).reshape({-1});
}

FlatGroup::FlatGroup(std::string title, const PlannedGroup& planned, const std::vector<at::Tensor>& tensors, int world_size, int rank_)
    : unit_title(std::move(title)),
      layout(numels_of(tensors), alignment_of(planned), planned.replicated ? 1 : world_size),
      dtype(planned.dtype),
      compute_dtype(planned.compute_dtype),
      reduce_dtype(planned.reduce_dtype),
      keeps_master(planned.keeps_master),
      kept_wide(planned.kept_wide),
      replicated(planned.replicated),
      rank(planned.replicated ? 0 : rank_) {
  TORCH_INTERNAL_ASSERT(layout.shard_numel() == planned.shard_numel, "plan and layout differ");
  shard = at::zeros({layout.shard_numel()}, at::dtype(dtype));
  shard_gradient = at::empty({layout.shard_numel()}, at::dtype(dtype));
  unsharded = at::empty({layout.unsharded_numel()}, at::dtype(compute_dtype));
  parameters.resize(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto& p = parameters[i];
    p.name = planned.parameters[i].name;
    p.group = this;
    p.index = static_cast<int64_t>(i);
    p.handle = tensors[i];
    p.full_shape = p.handle.sizes().vec();
    // Also of a contiguous tensor: the stride of a dimension of size 1 is free, but kernels choose their way, and so their rounding, by it.
    const bool dense = p.handle.is_non_overlapping_and_dense();
    p.full_strides = dense ? p.handle.strides().vec() : contiguous_strides(p.full_shape);
    if (dense && !p.handle.is_contiguous()) {
      p.memory_order.resize(p.full_shape.size());
      std::iota(p.memory_order.begin(), p.memory_order.end(), 0);
      std::stable_sort(p.memory_order.begin(), p.memory_order.end(),
                       [&](int64_t a, int64_t b) { return p.full_strides[a] > p.full_strides[b]; });
    }
    if (replicated) {
      const auto whole = [&](const at::Tensor& flat) {
        return view_with_keys(flat, flat.key_set(), p.full_shape, p.full_strides, layout.offset(p.index));
      };
      p.full = p.slice = whole(shard);
      p.gradient_slice = whole(shard_gradient);
      continue;
    }
    p.full = keyed_view(unsharded, p.full_shape, p.full_strides, layout.offset(p.index));
    p.slice = keyed_slice(shard, layout.slice(p.index, rank));
    p.gradient_slice = keyed_slice(shard_gradient, layout.slice(p.index, rank));
  }
  // Only the storage objects are wanted of these two; nobody has touched their memory yet.
  release_memory();
  empty_storage(storage_of(shard_gradient), "no gradient of " + unit_title + " has been reduced yet");
}

int64_t FlatGroup::unsharded_bytes() const { return layout.unsharded_numel() * static_cast<int64_t>(c10::elementSize(compute_dtype)); }

int64_t FlatGroup::shard_gradient_bytes() const { return static_cast<int64_t>(storage_of(shard_gradient).nbytes()); }

void FlatGroup::hold_memory(at::DataPtr memory) { fill_storage(storage_of(unsharded), std::move(memory), unsharded_bytes()); }

void FlatGroup::borrow_shard() {  // the loan holds the shard: a graph may outlive the model
  const auto release = [](void* lender) { delete static_cast<at::Tensor*>(lender); };
  hold_memory(at::DataPtr(shard.data_ptr(), new at::Tensor(shard), release, shard.device()));
}

at::Tensor FlatGroup::flat_on(at::DataPtr memory) const {
  auto storage =
      c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), unsharded_bytes(), std::move(memory), nullptr, false);
  return at::empty({0}, unsharded.options()).set_(c10::Storage(std::move(storage)), 0, {layout.unsharded_numel()}, {1});
}

void FlatGroup::release_memory() {
  empty_storage(storage_of(unsharded),
                "the parameters of " + unit_title +
                    " are not gathered now, so there is no memory to point to. Their data can be reached by operators, or "
                    "by pointer inside summon_full_params()");
}

void FlatGroup::allocate_shard_gradient() {
  if (shard_gradient_bytes()) return;
  const auto bytes = shard_gradient.numel() * shard_gradient.element_size();
  fill_storage(storage_of(shard_gradient), c10::GetAllocator(shard_gradient.device().type())->allocate(bytes), bytes);
  shard_gradient.zero_();
}

void FlatGroup::fill_shard_from_handles() {
  for (const auto& p : parameters) {
    const ShardSlice part = layout.slice(p.index, rank);
    if (part.length)
      shard.narrow(0, part.begin_in_shard, part.length).copy_(p.in_memory_order(p.handle).narrow(0, part.begin_in_parameter, part.length));
  }
}

void FlatGroup::fill_shard_from(const at::Tensor& flat) { shard.copy_(flat.narrow(0, rank * layout.shard_numel(), layout.shard_numel())); }

at::Tensor FlatGroup::flatten_handles() const {
  auto flat = at::zeros({layout.unsharded_numel()}, at::dtype(dtype));
  for (const auto& p : parameters) flat.narrow(0, layout.offset(p.index), p.handle.numel()).copy_(p.in_memory_order(p.handle));
  return flat;
}

at::Tensor FlatGroup::plain(const ShardedParameter& p, const at::Tensor& flat) const {
  auto tensor = at::empty_strided(p.full_shape, p.full_strides, flat.options());
  const auto in_order = p.memory_order.empty() ? tensor : tensor.permute(p.memory_order);
  in_order.copy_(flat.narrow(0, layout.offset(p.index), tensor.numel()).view(in_order.sizes()));
  return tensor;
}

void FlatGroup::hold_full() { hold(&ShardedParameter::full); }
void FlatGroup::hold_slices() { hold(&ShardedParameter::slice); }

void FlatGroup::hold(at::Tensor ShardedParameter::*data) {
  for (auto& p : parameters) {
    if (!replicated || p.handle.storage().unsafeGetStorageImpl() != &storage_of(shard)) p.handle.set_data(p.*data);
    // set_data drops the accumulator when the dtype changes.
    if (p.sink) torch::autograd::impl::set_grad_accumulator(p.handle, p.sink);
  }
}

std::vector<ShardedParameter*> FlatGroup::parameters_under(const at::Tensor& view) {
  std::vector<ShardedParameter*> reached;
  if (view.numel() == 0) return reached;
  const int64_t begin = view.storage_offset();
  int64_t last = begin;
  for (int64_t d = 0; d < view.dim(); ++d) last += (view.size(d) - 1) * view.stride(d);
  for (auto& p : parameters)
    if (layout.offset(p.index) <= last && begin < layout.offset(p.index) + layout.numel(p.index)) reached.push_back(&p);
  return reached;
}

at::Tensor FlatGroup::own_part_of(const at::Tensor& flat) const {
  return flat.narrow(0, rank * layout.shard_numel(), layout.shard_numel());
}

void FlatGroup::keep_written(ShardedParameter& parameter) {
  if (is_whole()) return;
  const ShardSlice part = layout.slice(parameter.index, rank);
  if (part.length)
    shard.narrow(0, part.begin_in_shard, part.length).copy_(own_part_of(unsharded).narrow(0, part.begin_in_shard, part.length));
}

void FlatGroup::keep_changes() {
  if (is_whole()) return;
  const auto own = own_part_of(unsharded);
  shard.copy_(at::where(own == shard.to(compute_dtype), shard, own.to(dtype)));
}

}  // namespace fsdp
