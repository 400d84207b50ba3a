// The dispatch key that makes accesses to sharded parameters visible.
//
// An out-of-core key that LibTorch itself never uses. Every tensor that shares a sharded parameter's storage carries it (views
// inherit their base's keys), so the boxed fallback registered for it in access_hook.cpp sees each operator that touches one.
#pragma once

#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fsdp {

constexpr auto kAccessKey = c10::DispatchKey::DeferredInit;

// Put around the runtime's own tensor calls. Never around the kernel of an intercepted operator: it may touch other units.
struct WithoutAccessHook {
  c10::impl::ExcludeDispatchKeyGuard guard{kAccessKey};
};

}  // namespace fsdp
