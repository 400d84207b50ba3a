// A decoder from a Hugging Face folder, with adapters where there are some, sharded.
#pragma once

#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/lora.h>
#include <fsdp/process_group.h>

#include <optional>
#include <string>
#include <string_view>

#include "models/causal_lm.h"

namespace fsdp::tools {

using ShardedLM = FullyShardedDataParallel<models::CausalLMImpl>;

bool is_adapter(std::string_view name);

// With fresh weights, and with fresh adapters where `adapters` has options; what else those say, fan_in_fan_out is the architecture's. All
// ranks must call.
models::CausalLM make_model(const models::ModelConfig& config, std::optional<lora::LoraOptions> adapters, const ProcessGroup& group);

// The folder's weights, each rank its own slices of them. All ranks must call.
void load_pretrained(ShardedLM& model, const models::ModelConfig& config, const std::string& folder);

}  // namespace fsdp::tools
