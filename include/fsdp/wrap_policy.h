/// Which modules become units: groups of parameters that are gathered and freed together.
///
///     auto policy = fsdp::size_based_auto_wrap_policy(1'000'000);
///     fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = policy});
///
/// Policies choose modules, never replace them: the model stays as it was written. What no chosen module holds belongs to the
/// root unit. A policy must decide the same on all ranks; plans are compared when a model is wrapped.
///
/// Thread safety: a policy is called by the wrapping thread only.
#pragma once

#include <fsdp/export.h>

#include <cstdint>
#include <functional>

namespace torch::nn {
class Module;
}

namespace fsdp {

/// Asked about each module on the way down (`recurse` = true: shall its children be considered?) and on the way up
/// (`recurse` = false: shall it become a unit?). `nonwrapped_numel`: elements of the parameters in the module's subtree; on the way up
/// less those that units below it have taken. An empty function means one unit for everything.
using WrapPolicy = std::function<bool(const torch::nn::Module& module, bool recurse, int64_t nonwrapped_numel)>;

/// Bottom-up by size, with the semantics of torch.distributed.fsdp.wrap.size_based_auto_wrap_policy: a module becomes a unit when
/// the parameters in it that no unit below it has taken hold at least `min_num_params` elements (inclusive; elements, not
/// bytes). MultiheadAttention is never entered, since its projection is used without being called; ModuleList and ModuleDict are
/// entered but never become units. Smaller values give more and smaller units: less memory, more collectives.
FSDP_API WrapPolicy size_based_auto_wrap_policy(int64_t min_num_params = 100'000'000);

/// Every module for which `is_unit` returns true becomes a unit, wherever it is in the tree.
FSDP_API WrapPolicy lambda_auto_wrap_policy(std::function<bool(const torch::nn::Module& module)> is_unit);

/// Every module of one of these types (or derived from one) becomes a unit: module_wrap_policy<BlockImpl, HeadImpl>(). Types are those of
/// the modules, not of their holders.
template <class... Modules>
WrapPolicy module_wrap_policy() {
  return lambda_auto_wrap_policy(
      [](const torch::nn::Module& module) { return (... || (dynamic_cast<const Modules*>(&module) != nullptr)); });
}

}  // namespace fsdp
