// What fsdp-train understands, and that all else is refused by its name.
#include "tools/train_config.h"

#include <c10/util/Exception.h>

#include <catch2/catch_all.hpp>
#include <nlohmann/json.hpp>

namespace {

using Catch::Matchers::ContainsSubstring;
using fsdp::tools::OptimizerType;
using fsdp::tools::read_train_config;
using fsdp::tools::ScheduleType;

constexpr const char* kLeast = R"({"model": {"config": {"model_type": "gpt2"}}, "data": {"train": "a.txt", "seq_len": 8},
                                   "train_micro_batch_size_per_gpu": 2, "max_steps": 5})";

std::string error_of(const std::string& text, const std::vector<std::string>& overrides = {}, int world_size = 2) {
  try {
    read_train_config(text, overrides, world_size);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace

TEST_CASE("a least configuration has DeepSpeed's defaults", "[tools][quick]") {
  const auto config = read_train_config(kLeast, {}, 2);
  CHECK(config.batch.global == 4);
  CHECK(config.batch.accumulation == 1);
  CHECK(config.optimizer.type == OptimizerType::ADAMW);
  CHECK(config.optimizer.lr == 1e-3);
  CHECK(config.optimizer.weight_decay == 0);
  CHECK(config.schedule.type == ScheduleType::CONSTANT);
  CHECK(config.zero_stage == 3);
  CHECK(config.dtype == fsdp::tools::ComputeDtype::FP32);
  CHECK(config.gradient_clipping == 0);
}

TEST_CASE("any two batch sizes give the third", "[tools][quick]") {
  struct Row {
    std::vector<std::string> set;
    int64_t global, micro, accumulation;
  };
  const std::string micro = "train_micro_batch_size_per_gpu=", all = "train_batch_size=", steps = "gradient_accumulation_steps=";
  for (const auto& row : {Row{{all + "12"}, 12, 2, 3}, Row{{steps + "3"}, 12, 2, 3}, Row{{micro + "null", all + "12"}, 12, 6, 1},
                          Row{{micro + "null", all + "12", steps + "2"}, 12, 3, 2}, Row{{all + "12", steps + "3"}, 12, 2, 3}}) {
    const auto batch = read_train_config(kLeast, row.set, 2).batch;
    CHECK(std::array{batch.global, batch.micro, batch.accumulation} == std::array{row.global, row.micro, row.accumulation});
  }
  CHECK_THAT(error_of(kLeast, {all + "13"}), ContainsSubstring("'train_batch_size' is 13, which cannot be divided by 4"));
  CHECK_THAT(error_of(kLeast, {all + "12", steps + "2"}), ContainsSubstring("'train_batch_size' is 12") && ContainsSubstring("is 8"));
  CHECK_THAT(error_of(kLeast, {micro + "null"}), ContainsSubstring("got neither"));
}

TEST_CASE("Adam decays like AdamW unless adam_w_mode is false", "[tools][quick]") {
  CHECK(read_train_config(kLeast, {"optimizer.type=Adam", "optimizer.params.lr=0.1"}, 1).optimizer.type == OptimizerType::ADAMW);
  CHECK(read_train_config(kLeast, {"optimizer.type=Adam", "optimizer.params.adam_w_mode=false"}, 1).optimizer.type == OptimizerType::ADAM);
}

TEST_CASE("mistakes in a configuration are named", "[tools][quick]") {
  struct Row {
    std::string set, expected;
  };
  for (const auto& row : {
           Row{"zero_optimisation.stage=3", "not understood: 'zero_optimisation'"},
           {"zero_optimization.stage=1", "'zero_optimization.stage': expected 2 or 3, got 1"},
           {"zero_optimization.offload_optimizer.device=cpu", "not understood: 'zero_optimization.offload_optimizer'"},
           {"optimizer.type=Lamb", "'optimizer.type': expected one of Adam, AdamW, SGD, got 'Lamb'"},
           {"optimizer.params.lr=fast", "'optimizer.params.lr': expected a number, got \"fast\""},
           {"optimizer.params.lr=-1", "'optimizer.params.lr': expected at least 0, got -1"},
           {"optimizer.params.betas=[0.9]", "'optimizer.params.betas': expected two numbers"},
           {"optimizer.params.momentum=0.9", "not understood: 'optimizer.params.momentum'"},
           {"scheduler.params.warmup_num_steps=3", "expected 'scheduler.type'"},
           {"scheduler.type=OneCycle", "'scheduler.type': expected one of"},
           {"bf16.enabled=1", "'bf16.enabled': expected true or false, got 1"},
           {"max_steps=0", "'max_steps': expected at least 1, got 0"},
           {"max_steps=2.5", "'max_steps': expected a whole number, got 2.5"},
           {"max_steps=null", "expected 'max_steps'"},
           {"data.seq_len=null", "expected 'data.seq_len'"},
           {"data.train=null", "expected 'data.train'"},
           {"data=3", "'data': expected an object, got 3"},
           {"model.config=null", "expected either 'model.path'"},
           {"model.path=x", "got both"},
           {"lora.r=0", "'lora.r': expected at least 1, got 0"},
           {"lora.target_modules=[]", "'lora.target_modules' is empty"},
           {"lora.bias=all", "not understood: 'lora.bias'"},
           {"fp16.loss_scale=-1", "'fp16.loss_scale': expected at least 0"},
           {"fp16.hysteresis=0", "'fp16.hysteresis': expected at least 1"},
           {"data.train=x.safetensors", "a length of their own"},
           {"gradient_clipping=-1", "'gradient_clipping': expected at least 0"},
           {"max_steps.deep=1", "--set max_steps.deep=1"},
           {"=1", "expected key.sub=value"},
       }) {
    CAPTURE(row.set);
    CHECK_THAT(error_of(kLeast, {row.set}), ContainsSubstring(row.expected));
  }
  CHECK_THAT(error_of("{"), ContainsSubstring("no JSON"));
  CHECK_THAT(error_of("[]"), ContainsSubstring("expected an object"));
  CHECK_THAT(error_of(R"({"seed": 1, "seed": 2})"), ContainsSubstring("\"seed\" twice"));
}
