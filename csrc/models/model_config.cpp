#include "models/model_config.h"

#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "models/json_section.h"

namespace fsdp::models {
namespace {

using nlohmann::json;

// Names, token ids, how the file was written and what generation does: nothing of it enters forward.
constexpr const char* kPassedOver[] = {
    "architectures",
    "model_type",
    "_name_or_path",
    "name_or_path",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "unk_token_id",
    "sep_token_id",
    "id2label",
    "label2id",
    "task_specific_params",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "attn_implementation",
    "_attn_implementation",
    "is_llama_config",
    "transformers.js_config",
    "gradient_checkpointing",
    "chunk_size_feed_forward",
    "problem_type",
    "n_ctx",
    "summary_activation",
    "summary_first_dropout",
    "summary_proj_to_labels",
    "summary_type",
    "summary_use_proj",
    "keys_to_ignore_at_inference",
};

Architecture architecture_of(JsonSection& section) {
  const std::map<std::string, Architecture> by_type{
      {"llama", Architecture::LLAMA}, {"qwen2", Architecture::QWEN2}, {"gpt2", Architecture::GPT2}};
  const std::map<std::string, Architecture> by_class{
      {"LlamaForCausalLM", Architecture::LLAMA}, {"Qwen2ForCausalLM", Architecture::QWEN2}, {"GPT2LMHeadModel", Architecture::GPT2}};
  const auto classes = section.take<std::vector<std::string>>("architectures");
  const auto type = section.take<std::string>("model_type");
  if (classes) {
    const bool known = classes->size() == 1 && by_class.contains(classes->front());
    TORCH_CHECK(known, "'", section.name_of("architectures"), "': expected LlamaForCausalLM, Qwen2ForCausalLM or GPT2LMHeadModel, got ",
                json(*classes).dump());
    TORCH_CHECK(!type || (by_type.contains(*type) && by_type.at(*type) == by_class.at(classes->front())), "'",
                section.name_of("model_type"), "' is '", type.value_or(""), "', which contradicts 'architectures' ", json(*classes).dump());
    return by_class.at(classes->front());
  }
  TORCH_CHECK(type && by_type.contains(*type), "'", section.name_of("model_type"), "': expected llama, qwen2 or gpt2, got ",
              type ? "'" + *type + "'" : "nothing");
  return by_type.at(*type);
}

int64_t size_of(JsonSection& section, const char* key) {
  const auto value = section.take<int64_t>(key);
  TORCH_CHECK(value, "expected '", section.name_of(key), "'");
  TORCH_CHECK(*value >= 1 && *value <= int64_t{1} << 31, "'", section.name_of(key), "': expected at least 1, got ", *value);
  return *value;
}

double dropout_of(JsonSection& section, const char* key, double otherwise) {
  const double value = section.take_or(key, otherwise);
  TORCH_CHECK(value >= 0 && value < 1, "'", section.name_of(key), "': expected a probability below 1, got ", value);
  return value;
}

// A key that would change the arithmetic in a way that is not built.
template <class T>
void require(JsonSection& section, const char* key, T only) {
  const auto value = section.take<T>(key);
  TORCH_CHECK(!value || *value == only, "'", section.name_of(key), "': only ", json(only).dump(), " is supported, got ",
              json(*value).dump());
}

Activation activation_of(JsonSection& section, const char* key, const char* otherwise) {
  const std::map<std::string, Activation> known{{"silu", Activation::SILU},
                                                {"swish", Activation::SILU},
                                                {"gelu", Activation::GELU},
                                                {"gelu_new", Activation::GELU_TANH},
                                                {"gelu_pytorch_tanh", Activation::GELU_TANH},
                                                {"relu", Activation::RELU}};
  const auto name = section.take_or<std::string>(key, otherwise);
  const auto found = known.find(name);
  TORCH_CHECK(found != known.end(), "'", section.name_of(key), "': expected silu, gelu, gelu_new, gelu_pytorch_tanh or relu, got '", name,
              "'");
  return found->second;
}

// rope_theta stands at the top (older files) or in rope_parameters; rope_scaling is the older name of the latter's other half.
double rope_theta_of(JsonSection& section) {
  auto theta = section.take<double>("rope_theta");
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    auto rope = section.take_section(key);
    if (!rope) continue;
    require<std::string>(*rope, "rope_type", "default");
    require<std::string>(*rope, "type", "default");
    require<double>(*rope, "partial_rotary_factor", 1.0);
    if (const auto inner = rope->take<double>("rope_theta")) {
      TORCH_CHECK(!theta || *theta == *inner, "'", section.name_of("rope_theta"), "' is ", *theta, " and '", rope->name_of("rope_theta"),
                  "' is ", *inner);
      theta = inner;
    }
    rope->refuse_rest();
  }
  TORCH_CHECK(!theta || *theta > 1, "'", section.name_of("rope_theta"), "': expected above 1, got ", *theta);
  return theta.value_or(10000.0);
}

void read_rotary(JsonSection& section, ModelConfig& config) {
  const bool qwen = config.architecture == Architecture::QWEN2;
  config.vocab_size = size_of(section, "vocab_size");
  config.hidden_size = size_of(section, "hidden_size");
  config.intermediate_size = size_of(section, "intermediate_size");
  config.layers = size_of(section, "num_hidden_layers");
  config.heads = size_of(section, "num_attention_heads");
  config.kv_heads = section.take_or("num_key_value_heads", config.heads);
  TORCH_CHECK(config.kv_heads >= 1 && config.heads % config.kv_heads == 0, "'", section.name_of("num_key_value_heads"),
              "': expected a divisor of ", config.heads, " (num_attention_heads), got ", config.kv_heads);
  const auto head_dim = section.take<int64_t>("head_dim");
  TORCH_CHECK(head_dim || config.hidden_size % config.heads == 0, "'", section.name_of("hidden_size"), "': expected a multiple of ",
              config.heads, " (num_attention_heads), got ", config.hidden_size);
  config.head_dim = head_dim.value_or(config.hidden_size / config.heads);
  TORCH_CHECK(config.head_dim >= 2 && config.head_dim % 2 == 0, "'", section.name_of("head_dim"), "': expected an even number, got ",
              config.head_dim);
  config.max_positions = section.take_or<int64_t>("max_position_embeddings", 2048);
  config.norm_eps = section.take_or("rms_norm_eps", 1e-6);
  config.rope_theta = rope_theta_of(section);
  config.activation = activation_of(section, "hidden_act", "silu");
  config.attention_dropout = dropout_of(section, "attention_dropout", 0);
  config.tied = section.take_or("tie_word_embeddings", false);
  require<int64_t>(section, "pretraining_tp", 1);
  require<bool>(section, "rope_interleaved", false);
  if (qwen) {
    config.qkv_bias = true;
    require<bool>(section, "use_sliding_window", false);  // without it the two below say nothing
    section.take_json("sliding_window");
    section.take_json("max_window_layers");
    for (const auto& kind : section.take_or<std::vector<std::string>>("layer_types", {}))
      TORCH_CHECK(kind == "full_attention", "'", section.name_of("layer_types"), "': only full_attention is supported, got ", kind);
  } else {
    config.qkv_bias = config.output_bias = section.take_or("attention_bias", false);
    config.mlp_bias = section.take_or("mlp_bias", false);
  }
}

void read_gpt2(JsonSection& section, ModelConfig& config) {
  config.vocab_size = size_of(section, "vocab_size");
  config.hidden_size = size_of(section, "n_embd");
  config.layers = size_of(section, "n_layer");
  config.heads = config.kv_heads = size_of(section, "n_head");
  TORCH_CHECK(config.hidden_size % config.heads == 0, "'", section.name_of("n_embd"), "': expected a multiple of ", config.heads,
              " (n_head), got ", config.hidden_size);
  config.head_dim = config.hidden_size / config.heads;
  config.intermediate_size = section.take_or("n_inner", 4 * config.hidden_size);
  TORCH_CHECK(config.intermediate_size >= 1, "'", section.name_of("n_inner"), "': expected at least 1, got ", config.intermediate_size);
  config.max_positions = size_of(section, "n_positions");
  config.norm_eps = section.take_or("layer_norm_epsilon", 1e-5);
  config.activation = activation_of(section, "activation_function", "gelu_new");
  config.embedding_dropout = dropout_of(section, "embd_pdrop", 0.1);
  config.residual_dropout = dropout_of(section, "resid_pdrop", 0.1);
  config.attention_dropout = dropout_of(section, "attn_pdrop", 0.1);
  config.tied = section.take_or("tie_word_embeddings", true);
  require<bool>(section, "scale_attn_weights", true);
  require<bool>(section, "scale_attn_by_inverse_layer_idx", false);
  require<bool>(section, "reorder_and_upcast_attn", false);
  require<bool>(section, "add_cross_attention", false);
}

}  // namespace

ModelConfig parse_config(const std::string& json_text, const std::string& where) {
  const json document = json::parse(json_text, nullptr, /*allow_exceptions=*/false);
  TORCH_CHECK(!document.is_discarded(), "'", where, "' is no JSON");
  JsonSection section(document, where);
  ModelConfig config;
  config.architecture = architecture_of(section);
  config.architecture == Architecture::GPT2 ? read_gpt2(section, config) : read_rotary(section, config);
  config.initializer_range = section.take_or("initializer_range", 0.02);
  TORCH_CHECK(config.initializer_range >= 0 && config.norm_eps > 0, "'", where,
              "': initializer_range must not be negative, and a norm's epsilon above 0");
  require<bool>(section, "is_encoder_decoder", false);
  for (const char* key : kPassedOver) section.take_json(key);
  section.refuse_rest();
  return config;
}

std::string read_config_text(const std::string& folder) {
  const std::string path = folder + "/config.json";
  std::ifstream file(path);
  TORCH_CHECK(file, "'", path, "' cannot be read: expected a folder as Hugging Face writes it");
  return {std::istreambuf_iterator<char>(file), {}};
}

ModelConfig load_config(const std::string& folder) { return parse_config(read_config_text(folder), folder + "/config.json"); }

bool is_no_weight(const ModelConfig& config, std::string_view name) {
  if (config.architecture == Architecture::GPT2 && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"))) return true;
  return name.ends_with(".rotary_emb.inv_freq") || (config.tied && name == "lm_head.weight");
}

}  // namespace fsdp::models
