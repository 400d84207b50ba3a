/// Visibility of the library's symbols: everything is hidden except what carries FSDP_API.
#pragma once

#if defined(__GNUC__) || defined(__clang__)
#define FSDP_API [[gnu::visibility("default")]]
#else
#define FSDP_API
#endif
