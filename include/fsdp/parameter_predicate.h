/// Which parameters an option is meant for.
#pragma once

#include <fsdp/export.h>

#include <functional>
#include <string>
#include <string_view>

namespace fsdp {

/// Asked once per tensor when a model is wrapped, with its first name as in named_parameters(): "blocks.0.query.weight". Must answer alike
/// on all ranks. An empty function means no parameter.
using ParameterPredicate = std::function<bool(std::string_view name)>;

/// Parameters whose name has `part` in it: name_contains("lora_").
inline ParameterPredicate name_contains(std::string part) {
  return [part = std::move(part)](std::string_view name) { return name.find(part) != std::string_view::npos; };
}

}  // namespace fsdp
