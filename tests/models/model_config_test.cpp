// Which config.json files are understood; what would change the arithmetic and is not built is refused by its name.
#include "models/model_config.h"

#include <c10/util/Exception.h>

#include <catch2/catch_all.hpp>
#include <nlohmann/json.hpp>

namespace {

using Catch::Matchers::ContainsSubstring;
using fsdp::models::Architecture;
using fsdp::models::parse_config;
using nlohmann::json;

const json kLlama = json::parse(R"({"model_type": "llama", "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16,
                                    "num_hidden_layers": 1, "num_attention_heads": 2})");
const json kQwen2 = json::parse(R"({"architectures": ["Qwen2ForCausalLM"], "vocab_size": 10, "hidden_size": 8, "intermediate_size": 16,
                                    "num_hidden_layers": 1, "num_attention_heads": 2, "use_sliding_window": false, "sliding_window": 4096})");
const json kGpt2 = json::parse(R"({"model_type": "gpt2", "vocab_size": 10, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 4})");

std::string error_of(json base, const char* patch) {
  base.merge_patch(json::parse(patch));
  try {
    parse_config(base.dump(), "config.json");
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace

TEST_CASE("defaults of Hugging Face's configurations", "[models][quick]") {
  const auto llama = parse_config(kLlama.dump(), "config.json");
  CHECK(llama.kv_heads == 2);
  CHECK(llama.head_dim == 4);
  CHECK(llama.rope_theta == 10000);
  CHECK_FALSE(llama.tied);
  CHECK_FALSE(llama.qkv_bias);
  const auto qwen = parse_config(kQwen2.dump(), "config.json");
  CHECK(qwen.architecture == Architecture::QWEN2);
  CHECK(qwen.qkv_bias);
  CHECK_FALSE(qwen.output_bias);
  const auto gpt2 = parse_config(kGpt2.dump(), "config.json");
  CHECK(gpt2.tied);
  CHECK(gpt2.intermediate_size == 32);
  CHECK(gpt2.residual_dropout == 0.1);
}

TEST_CASE("rope_theta at the top, inside rope_parameters, and both", "[models][quick]") {
  auto config = kLlama;
  config["rope_theta"] = 500.0;
  CHECK(parse_config(config.dump(), "c").rope_theta == 500);
  config.erase("rope_theta");
  config["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 700}};
  CHECK(parse_config(config.dump(), "c").rope_theta == 700);
  CHECK_THAT(error_of(config, R"({"rope_theta": 5})"), ContainsSubstring("'config.json.rope_theta' is 5"));
}

TEST_CASE("configurations that are not supported are refused by name", "[models][quick]") {
  struct Row {
    const json& base;
    const char* patch;
    const char* expected;
  };
  for (const auto& row : {
           Row{kLlama, R"({"model_type": "mamba"})", "'config.json.model_type': expected llama, qwen2 or gpt2, got 'mamba'"},
           {kLlama, R"({"architectures": ["Qwen2ForCausalLM"]})", "contradicts"},
           {kLlama, R"({"architectures": ["LlamaModel"]})", "'config.json.architectures'"},
           {kLlama, R"({"rope_scaling": {"type": "linear", "factor": 2}})", "'config.json.rope_scaling.type': only \"default\""},
           {kLlama, R"({"rope_parameters": {"rope_type": "yarn"}})", "'config.json.rope_parameters.rope_type'"},
           {kLlama, R"({"hidden_act": "mish"})", "'config.json.hidden_act'"},
           {kLlama, R"({"num_key_value_heads": 3})", "'config.json.num_key_value_heads': expected a divisor of 2"},
           {kLlama, R"({"num_attention_heads": 3})", "'config.json.hidden_size': expected a multiple of 3"},
           {kLlama, R"({"head_dim": 3})", "'config.json.head_dim': expected an even number"},
           {kLlama, R"({"quantization_config": {"bits": 4}})", "not understood: 'config.json.quantization_config'"},
           {kLlama, R"({"vocab_size": null})", "expected 'config.json.vocab_size'"},
           {kLlama, R"({"vocab_size": "10"})", "'config.json.vocab_size': expected a whole number"},
           {kLlama, R"({"attention_dropout": 1})", "'config.json.attention_dropout'"},
           {kQwen2, R"({"use_sliding_window": true})", "'config.json.use_sliding_window': only false"},
           {kQwen2, R"({"layer_types": ["sliding_attention"]})", "'config.json.layer_types'"},
           {kGpt2, R"({"scale_attn_by_inverse_layer_idx": true})", "'config.json.scale_attn_by_inverse_layer_idx'"},
           {kGpt2, R"({"rope_theta": 10})", "not understood: 'config.json.rope_theta'"},
       }) {
    CAPTURE(row.patch);
    CHECK_THAT(error_of(row.base, row.patch), ContainsSubstring(row.expected));
  }
  CHECK_THROWS_WITH(parse_config("{", "c"), ContainsSubstring("'c' is no JSON"));
  CHECK_THROWS_WITH(fsdp::models::load_config("/nowhere"), ContainsSubstring("'/nowhere/config.json' cannot be read"));
}
