// Tiny models of Hugging Face's architectures compute and train as PyTorch does. The folders beside this file, and what PyTorch found, were
// made by make_golden.py.
#include <fsdp/adamw.h>
#include <fsdp/exchange.h>
#include <fsdp/lora.h>
#include <fsdp/safetensors.h>
#include <fsdp/weights.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "models/causal_lm.h"
#include "models/model_config.h"
#include "support/ranks.h"

namespace {

using nlohmann::json;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT(file.good(), path << " cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Golden {
  explicit Golden(const std::string& name)
      : folder(std::string(FSDP_GOLDEN_FOLDER "/") + name),
        expected(json::parse(bytes_of(folder + "/expected.json"))),
        ids(fsdp::SafetensorsFile(folder + "/batches.safetensors").read("input_ids")) {}

  fsdp::models::CausalLM model() const {
    auto net = fsdp::models::make_model(fsdp::models::load_config(folder));
    fsdp::load_weights(*net, folder);
    return net;
  }

  std::string folder;
  json expected;
  torch::Tensor ids;  // (steps, global batch, seq_len)
};

bool is_close(double a, double b, double tolerance) { return std::abs(a - b) <= tolerance; }

// A key's bias moves every score of a query by the same number, which softmax takes out again: its true gradient is zero, and Adam divides
// rounding noise by its own size. PyTorch against itself, with the batch split in two, moves these by up to 1e-3.
double tolerance_of(const std::string& name) { return name.ends_with("c_attn.bias") || name.ends_with("k_proj.bias") ? 1e-2 : 1e-4; }

enum class Kind { FULL, LORA };

// PEFT's name of an adapter's parameter in its modules.
std::string peft_name(const std::string& name) { return "base_model.model." + name + ".default.weight"; }

void check_training(fsdp::ProcessGroup& group, const std::string& name, fsdp::ShardingStrategy strategy, Kind kind) {
  const Golden golden(name);
  const auto& wanted = golden.expected[kind == Kind::FULL ? "full" : "lora"];
  const auto& hyper = golden.expected["hyperparameters"];
  auto net = golden.model();
  fsdp::FsdpOptions options{.sharding_strategy = strategy, .auto_wrap_policy = fsdp::models::block_policy()};
  if (kind == Kind::LORA) {
    fsdp::lora::attach(*net, fsdp::lora::read_options(golden.folder + "/adapter"));
    fsdp::lora::load_adapter(*net, golden.folder + "/adapter");
    options.unsharded = fsdp::name_contains("lora_");
  }
  fsdp::FullyShardedDataParallel model(net, group, options);
  model.eval();
  fsdp::AdamW optimizer(model, {.lr = hyper["lr"], .eps = hyper["eps"], .weight_decay = hyper["weight_decay"]});
  const int64_t rows = golden.ids.size(1) / group.world_size();
  for (int64_t step = 0; step < golden.ids.size(0); ++step) {
    const auto ids = golden.ids[step].narrow(0, group.rank() * rows, rows);
    const auto logits = model(ids.narrow(1, 0, ids.size(1) - 1));
    const auto loss = torch::nn::functional::cross_entropy(logits.flatten(0, 1), ids.narrow(1, 1, ids.size(1) - 1).flatten());
    loss.backward();
    const double norm = model.clip_grad_norm_(hyper["max_grad_norm"]).norm;
    optimizer.step();
    model.zero_grad();
    const double mean = fsdp::sum_over_ranks(group, {loss.item<double>()})[0] / group.world_size();
    const double wanted_loss = wanted["loss"][step], wanted_norm = wanted["grad_norm"][step];
    EXPECT(is_close(mean, wanted_loss, 1e-5 * wanted_loss), "step " << step << ": loss " << mean << ", PyTorch's " << wanted_loss);
    EXPECT(is_close(norm, wanted_norm, 1e-4 * wanted_norm), "step " << step << ": norm " << norm << ", PyTorch's " << wanted_norm);
  }
  const auto whole = model.summon_full_params();
  size_t compared = 0;
  for (const auto& item : model.module()->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    const auto key = kind == Kind::FULL ? item.key() : peft_name(item.key());
    EXPECT(wanted["final_sum_and_norm"].contains(key), key << " is not among PyTorch's");
    ++compared;
    const auto values = item.value().detach().to(torch::kDouble);
    const double sum = values.sum().item<double>(), size = values.norm().item<double>();
    const double wanted_sum = wanted["final_sum_and_norm"][key][0], wanted_size = wanted["final_sum_and_norm"][key][1];
    const double tolerance = tolerance_of(item.key()) * wanted_size;
    EXPECT(is_close(sum, wanted_sum, tolerance), key << ": sum " << sum << ", PyTorch's " << wanted_sum);
    EXPECT(is_close(size, wanted_size, tolerance), key << ": norm " << size << ", PyTorch's " << wanted_size);
  }
  EXPECT(compared == wanted["final_sum_and_norm"].size(), compared << " parameters trained");
}

void check_both(fsdp::ProcessGroup& group, const std::string& name, Kind kind = Kind::FULL) {
  check_training(group, name, fsdp::ShardingStrategy::FULL_SHARD, kind);
  check_training(group, name, fsdp::ShardingStrategy::SHARD_GRAD_OP, kind);
}

}  // namespace

RANKS_TEST("logits of the golden models", "[golden][quick]", 1) {
  for (const std::string name : {"llama", "qwen2", "gpt2"}) {
    const Golden golden(name);
    const torch::NoGradGuard no_grad;
    auto net = golden.model();
    net->eval();
    const auto logits = net->forward(golden.ids[0])[0][-1];
    const auto wanted = torch::tensor(golden.expected["logits_batch0_row0_last"].get<std::vector<double>>(), torch::kFloat);
    const double difference = (logits - wanted).abs().max().item<double>();
    EXPECT(difference < 1e-4, name << ": logits differ by " << difference);
  }
}

RANKS_TEST("20 steps of the golden llama", "[golden]", 1, 2, 3, 4) { check_both(group, "llama"); }
RANKS_TEST("20 steps of the golden qwen2", "[golden]", 1, 2, 3, 4) { check_both(group, "qwen2"); }
RANKS_TEST("20 steps of the golden gpt2", "[golden]", 1, 2, 3, 4) { check_both(group, "gpt2"); }
RANKS_TEST("20 steps of LoRA on the golden llama", "[golden]", 1, 2, 3, 4) { check_both(group, "llama", Kind::LORA); }
RANKS_TEST("20 steps of LoRA on the golden gpt2", "[golden]", 1, 2, 3, 4) { check_both(group, "gpt2", Kind::LORA); }
