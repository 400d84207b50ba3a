#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/lora.h>
#include <fsdp/weights.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "adapters/lora_adapter.h"
#include "checkpoint/file_io.h"
#include "checkpoint/json_text.h"
#include "comm/agreement.h"
#include "runtime/flat_views.h"

namespace fsdp::lora {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using nlohmann::json;

constexpr int64_t kMostConfigBytes = 1 << 20;

std::string config_path(const std::string& folder) { return (fs::path(folder) / "adapter_config.json").string(); }
std::string weights_path(const std::string& folder) { return (fs::path(folder) / "adapter_model.safetensors").string(); }

std::string peft_name(std::string_view name) { return c10::str("base_model.model.", name, ".weight"); }

const nn::Module& root_of(const nn::Module& module) { return module; }
const nn::Module& root_of(const FullyShardedBase& model) {
  detail::sharded_model(model);  // throws after unwrap
  return *model.children().front();
}

// A plain module has nobody to tell.
void agree(const nn::Module&, const std::string&, const std::string& refusal) { TORCH_CHECK(refusal.empty(), refusal); }
void agree(const FullyShardedBase& model, const std::string& topic, const std::string& refusal) {
  comm::exchange_or_refuse(FlatViews(detail::sharded_model(model)).collectives(), topic, "", refusal, "save or load its adapter");
}

bool is_writer(const nn::Module&) { return true; }
bool is_writer(const FullyShardedBase& model) { return FlatViews(detail::sharded_model(model)).rank() == 0; }

std::vector<AdaptedModule> adapters_in(const nn::Module& root, const char* who) {
  auto adapted = adapted_modules(root);
  TORCH_CHECK(!adapted.empty(), who, ": the model has no adapters; lora::attach puts them there");
  return adapted;
}

ParameterPredicate all_but(const std::vector<AdaptedModule>& adapted) {
  std::set<std::string, std::less<>> names;
  for (const auto& each : adapted)
    for (const auto* name : {kA, kB}) names.insert(each.path.empty() ? name : each.path + "." + name);
  return [names](std::string_view name) { return names.find(name) == names.end(); };
}

// What PEFT's config says of one adapter; all of a file are alike in it.
json facts_of(const LoraOptions& options) {
  const bool is_whole = options.alpha == std::floor(options.alpha) && options.alpha < 1e9;  // as PEFT's usually are
  return {{"r", options.r},
          {"lora_alpha", is_whole ? json(static_cast<int64_t>(options.alpha)) : json(options.alpha)},
          {"lora_dropout", options.dropout},
          {"use_rslora", options.rank_stabilized},
          {"fan_in_fan_out", options.fan_in_fan_out}};
}

json config_of(const std::vector<AdaptedModule>& adapted) {
  json config = facts_of(adapted.front().adapter->options());
  std::set<std::string> targets;
  for (const auto& each : adapted) {
    const auto& options = each.adapter->options();
    const json facts = facts_of(options);
    TORCH_CHECK(facts == facts_of(adapted.front().adapter->options()), "lora::save_adapter: the adapters of '", adapted.front().path,
                "' and '", each.path,
                "' were attached with different options, which one file cannot say: ", facts_of(adapted.front().adapter->options()).dump(),
                " and ", facts.dump());
    // "all-linear" means other modules to others, so the paths themselves are told.
    for (const auto& pattern : options.target_modules) targets.insert(pattern == kAllLinear ? each.path : pattern);
  }
  config["target_modules"] = targets;
  config["peft_type"] = "LORA";
  config["task_type"] = "CAUSAL_LM";
  config["bias"] = "none";
  config["inference_mode"] = true;
  config["base_model_name_or_path"] = nullptr;
  return config;
}

json read_config(const std::string& folder) {
  const auto path = config_path(folder);
  auto config = parse_json(read_text_file(path, kMostConfigBytes), "'" + path + "'", 16);
  TORCH_CHECK(config.is_object(), "'", path, "' is no JSON object");
  return config;
}

// Says nothing, in one of the ways in which PEFT writes that.
bool says_nothing(const json& value) {
  return value.is_null() || value == json(false) || ((value.is_object() || value.is_array() || value.is_string()) && value.empty());
}

template <class T>
T field(const json& config, const std::string& path, const char* key, T otherwise) {
  const auto found = config.find(key);
  if (found == config.end() || found->is_null()) return otherwise;
  const bool fits = std::is_same_v<T, bool>      ? found->is_boolean()
                    : std::is_same_v<T, int64_t> ? found->is_number_integer()
                                                 : found->is_number();
  TORCH_CHECK(fits, "'", path, "': ", key, " must be ",
              std::is_same_v<T, bool>      ? "true or false"
              : std::is_same_v<T, int64_t> ? "a whole number"
                                           : "a number",
              ", got ", found->dump().substr(0, 60));
  return found->get<T>();
}

template <class Model>
void save(const Model& model, const std::string& folder) {
  std::vector<AdaptedModule> adapted;
  json config;
  agree(model, "saving an adapter", comm::refusal_of([&] {
          adapted = adapters_in(root_of(model), "lora::save_adapter");
          config = config_of(adapted);
          fs::create_directories(folder);
        }));
  save_weights(model, weights_path(folder), {.rename = peft_name, .skip = all_but(adapted)});
  const auto failure = comm::refusal_of([&] {
    if (is_writer(model)) write_text_file(config_path(folder), config.dump(2) + "\n");
  });
  agree(model, "adapter saved", failure);
}

template <class Model>
void load(Model& model, const std::string& folder) {
  std::vector<AdaptedModule> adapted;
  agree(model, "loading an adapter", comm::refusal_of([&] {
          adapted = adapters_in(root_of(model), "lora::load_adapter");
          const auto saved = read_options(folder);
          for (const auto& each : adapted) {
            const auto& options = each.adapter->options();
            TORCH_CHECK(!each.adapter->merged, "lora::load_adapter: the adapter of '", each.path, "' is merged; unmerge first");
            TORCH_CHECK(options.r == saved.r && options.alpha == saved.alpha && options.rank_stabilized == saved.rank_stabilized,
                        "lora::load_adapter: the adapter of '", each.path, "' has r ", options.r, ", alpha ", options.alpha,
                        ", rank_stabilized ", options.rank_stabilized, "; the one in '", folder, "' has r ", saved.r, ", alpha ",
                        saved.alpha, ", rank_stabilized ", saved.rank_stabilized, ". Attach with read_options()");
          }
        }));
  load_weights(model, weights_path(folder), {.rename = peft_name, .skip = all_but(adapted)});
}

}  // namespace

LoraOptions read_options(const std::string& folder) {
  const auto config = read_config(folder);
  const auto path = config_path(folder);
  // What does not change what is computed with the values in the file.
  const std::set<std::string, std::less<>> passed_over{"base_model_name_or_path", "revision",     "task_type",
                                                       "inference_mode",          "peft_version", "megatron_core",
                                                       "qalora_group_size",       "auto_mapping"};
  const std::set<std::string, std::less<>> known{
      "r", "lora_alpha", "lora_dropout", "use_rslora", "fan_in_fan_out", "target_modules", "peft_type", "bias", "init_lora_weights"};
  for (const auto& [key, value] : config.items())
    TORCH_CHECK(known.contains(key) || passed_over.contains(key) || says_nothing(value), "'", path, "': ", key, " is ",
                value.dump().substr(0, 100), ", which this library does not do");
  const auto is = [&](const char* key, const char* expected) {
    const auto found = config.find(key);
    TORCH_CHECK(found != config.end() && *found == json(expected), "'", path, "': ", key, " must be \"", expected, "\", got ",
                found == config.end() ? "nothing" : found->dump().substr(0, 60));
  };
  is("peft_type", "LORA");
  if (config.contains("bias")) is("bias", "none");
  if (config.contains("init_lora_weights") && config["init_lora_weights"].is_string()) is("init_lora_weights", "gaussian");
  LoraOptions options;
  options.r = field<int64_t>(config, path, "r", 8);
  options.alpha = field<double>(config, path, "lora_alpha", 8);
  options.dropout = field<double>(config, path, "lora_dropout", 0);
  options.rank_stabilized = field<bool>(config, path, "use_rslora", false);
  options.fan_in_fan_out = field<bool>(config, path, "fan_in_fan_out", false);
  const auto targets = config.find("target_modules");
  TORCH_CHECK(targets != config.end() && (targets->is_array() ? !targets->empty() : *targets == json(kAllLinear)), "'", path,
              "': target_modules must be a list of names or \"", kAllLinear, "\"");
  options.target_modules.clear();
  if (!targets->is_array())
    options.target_modules.push_back(kAllLinear);
  else
    for (const auto& target : *targets) {
      TORCH_CHECK(target.is_string(), "'", path, "': target_modules must be names, got ", target.dump().substr(0, 60));
      options.target_modules.push_back(target.get<std::string>());
    }
  return options;
}

void save_adapter(const nn::Module& module, const std::string& folder) {
  const auto* wrapper = dynamic_cast<const FullyShardedBase*>(&module);
  wrapper ? save(*wrapper, folder) : save(module, folder);
}
void save_adapter(const FullyShardedBase& model, const std::string& folder) { save(model, folder); }

void load_adapter(nn::Module& module, const std::string& folder) {
  auto* wrapper = dynamic_cast<FullyShardedBase*>(&module);
  wrapper ? load(*wrapper, folder) : load(module, folder);
}
void load_adapter(FullyShardedBase& model, const std::string& folder) { load(model, folder); }

}  // namespace fsdp::lora
