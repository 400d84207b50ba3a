// What a Hugging Face config.json says about a decoder: Llama, Qwen2 or GPT-2.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace fsdp::models {

enum class Architecture { LLAMA, QWEN2, GPT2 };
enum class Activation { SILU, GELU, GELU_TANH, RELU };

struct ModelConfig {
  Architecture architecture = Architecture::LLAMA;
  int64_t vocab_size = 0, hidden_size = 0, intermediate_size = 0, layers = 0;
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t max_positions = 0;  // GPT-2: learned positions, so the longest row
  Activation activation = Activation::SILU;
  bool qkv_bias = false, output_bias = false, mlp_bias = false;
  bool tied = false;  // the head is the embedding's matrix
  double norm_eps = 1e-6, rope_theta = 10000, initializer_range = 0.02;
  double embedding_dropout = 0, residual_dropout = 0, attention_dropout = 0;
};

// Every key that changes the arithmetic is honoured or refused, keys that do not are passed over, and an unknown one is refused; all by
// name, with `where` (a file, or the key that holds the text) in front. Throws c10::Error.
ModelConfig parse_config(const std::string& json_text, const std::string& where);

// Of the file config.json in a folder.
ModelConfig load_config(const std::string& folder);
std::string read_config_text(const std::string& folder);

// Of a name in a model's files: a constant that older files carry along (masks, rotary frequencies), or the head's copy of a tied
// embedding.
bool is_no_weight(const ModelConfig& config, std::string_view name);

}  // namespace fsdp::models
