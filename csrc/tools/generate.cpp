// fsdp-generate: continues a row of token ids with a sharded model:
//
//     scripts/launch -n 2 build/bin/fsdp-generate --model DIR --adapter DIR --prompt-ids 504,3575,282 --max-new-tokens 20
//
// Rank 0 prints the new ids, one line. scripts/generate puts the tokenizer around it.
#include <fsdp/exchange.h>
#include <fsdp/process_group.h>
#include <torch/utils.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <string>
#include <vector>

#include "models/model_config.h"
#include "tools/pretrained.h"

namespace {

struct Request {
  std::string model, adapter;
  std::vector<int64_t> prompt;
  int64_t max_new_tokens = 20, top_k = 0, end_id = -1, seed = 0;
  double temperature = 0;
  bool bf16 = false;
};

// Of the logits of the last position, (vocab_size) fp32.
int64_t choose(const at::Tensor& logits, const Request& request) {
  if (request.temperature == 0) return logits.argmax().item<int64_t>();
  auto scores = logits / request.temperature;
  if (request.top_k > 0 && request.top_k < scores.numel()) {
    const auto least = std::get<0>(scores.topk(request.top_k)).min();
    scores = scores.masked_fill(scores < least, -std::numeric_limits<double>::infinity());
  }
  return scores.softmax(0).multinomial(1).item<int64_t>();
}

void generate(const Request& request, fsdp::ProcessGroup& group) {
  fsdp::models::ModelConfig config;
  std::optional<fsdp::lora::LoraOptions> adapters;
  fsdp::run_on_all(group, "reading the model's configuration", [&] {
    config = fsdp::models::load_config(request.model);
    if (!request.adapter.empty()) adapters = fsdp::lora::read_options(request.adapter);
    TORCH_CHECK(!request.prompt.empty(), "--prompt-ids: expected at least one token id");
    for (const auto id : request.prompt)
      TORCH_CHECK(id >= 0 && id < config.vocab_size, "--prompt-ids: ", id, " is no token; the model's are 0 to ", config.vocab_size - 1);
    TORCH_CHECK(request.temperature >= 0, "--temperature: expected at least 0, got ", request.temperature);
  });
  fsdp::FsdpOptions options;
  options.auto_wrap_policy = fsdp::models::block_policy();
  options.unsharded = fsdp::tools::is_adapter;
  if (request.bf16) options.mixed_precision.param_dtype = at::kBFloat16;
  auto net = fsdp::tools::make_model(config, adapters, group);
  for (auto& parameter : net->parameters()) parameter.set_requires_grad(false);
  fsdp::tools::ShardedLM model(net, group, options);
  fsdp::tools::load_pretrained(model, config, request.model);
  if (adapters) fsdp::lora::load_adapter(model, request.adapter);
  model.eval();

  const torch::NoGradGuard no_grad;
  torch::manual_seed(static_cast<uint64_t>(request.seed));
  auto ids = request.prompt;
  for (int64_t i = 0; i < request.max_new_tokens; ++i) {
    const auto logits = model(at::tensor(ids, at::kLong).unsqueeze(0))[0][-1].to(at::kFloat);
    // Rank 0 chooses for all, so that a last bit that differs between machines leads nobody elsewhere.
    const double chosen = group.rank() == 0 ? static_cast<double>(choose(logits, request)) : 0;
    ids.push_back(static_cast<int64_t>(fsdp::sum_over_ranks(group, {chosen})[0]));
    if (group.rank() == 0) {
      std::printf("%s%lld", i ? "," : "", static_cast<long long>(ids.back()));
      std::fflush(stdout);
    }
    if (ids.back() == request.end_id) break;
  }
  if (group.rank() == 0) std::printf("\n");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Continues a row of token ids with a model sharded over the ranks that it is started on.");
  Request request;
  app.add_option("--model", request.model, "a Hugging Face folder")->required();
  app.add_option("--adapter", request.adapter, "a folder in PEFT's layout");
  app.add_option("--prompt-ids", request.prompt, "token ids, with commas between them")->required()->delimiter(',');
  app.add_option("--max-new-tokens", request.max_new_tokens, "how many at most");
  app.add_option("--temperature", request.temperature, "0: the likeliest token; else sampled from the softmax of logits / temperature");
  app.add_option("--top-k", request.top_k, "sampled among so many likeliest tokens; 0: among all");
  app.add_option("--seed", request.seed, "of sampling");
  app.add_option("--end-id", request.end_id, "generation ends with this token");
  app.add_flag("--bf16", request.bf16, "compute in bf16");
  CLI11_PARSE(app, argc, argv);

  bool speaks = true;  // what is thrown on all ranks, rank 0 says
  const auto report = [&](const char* message) {
    if (speaks) std::fprintf(stderr, "fsdp-generate: %s\n", message);
    return 1;
  };
  try {
    fsdp::ProcessGroup group = fsdp::init_process_group();
    speaks = group.rank() == 0;
    generate(request, group);
    group.close();
    return 0;
  } catch (const c10::Error& error) {
    return report(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return report(error.what());
  }
}
