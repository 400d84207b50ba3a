#include "tools/pretrained.h"

#include <fsdp/exchange.h>
#include <fsdp/weights.h>

namespace fsdp::tools {

bool is_adapter(std::string_view name) { return name.find("lora_") != name.npos; }

models::CausalLM make_model(const models::ModelConfig& config, std::optional<lora::LoraOptions> adapters, const ProcessGroup& group) {
  auto net = models::make_model(config);
  if (adapters) {
    adapters->fan_in_fan_out = config.architecture == models::Architecture::GPT2;
    run_on_all(group, "attaching adapters", [&] { lora::attach(*net, *adapters); });
  }
  return net;
}

void load_pretrained(ShardedLM& model, const models::ModelConfig& config, const std::string& folder) {
  load_weights(model, folder, {.skip = is_adapter, .ignore = [&](std::string_view name) { return models::is_no_weight(config, name); }});
}

}  // namespace fsdp::tools
