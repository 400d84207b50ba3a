#include "tools/train_config.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "models/json_section.h"

namespace fsdp::tools {
namespace {

using models::JsonSection;
using nlohmann::json;

// JSON allows a key twice and the parser would keep the last: the person who wrote both means one of them.
json parse_strictly(const std::string& text) {
  std::vector<std::set<std::string>> keys;
  const auto no_twins = [&](int, json::parse_event_t event, json& parsed) {
    if (event == json::parse_event_t::object_start) keys.emplace_back();
    if (event == json::parse_event_t::object_end) keys.pop_back();
    if (event == json::parse_event_t::key)
      TORCH_CHECK(keys.back().insert(parsed.get<std::string>()).second, "the configuration has the key ", parsed.dump(), " twice");
    return true;
  };
  try {
    return json::parse(text, no_twins, true, /*ignore_comments=*/false);
  } catch (const json::parse_error& error) {
    TORCH_CHECK(false, "the configuration is no JSON: ", error.what());
  }
}

void set_override(json& root, const std::string& text) {
  const auto equals = text.find('=');
  TORCH_CHECK(equals != std::string::npos && equals > 0, "--set ", text, ": expected key.sub=value");
  std::string path(1, '/');
  path += text.substr(0, equals);
  for (auto& letter : path)
    if (letter == '.') letter = '/';
  const std::string value = text.substr(equals + 1);
  const json parsed = json::parse(value, nullptr, /*allow_exceptions=*/false);
  try {
    root[json::json_pointer(path)] = parsed.is_discarded() ? json(value) : parsed;
  } catch (const json::exception& error) {
    TORCH_CHECK(false, "--set ", text, ": ", error.what());
  }
}

template <class Value>
Value one_of(const std::string& name, const std::string& got, const std::map<std::string, Value>& known) {
  const auto found = known.find(got);
  std::string names;
  for (const auto& [each, _] : known) names += (names.empty() ? "" : ", ") + each;
  TORCH_CHECK(found != known.end(), "'", name, "': expected one of ", names, ", got '", got, "'");
  return found->second;
}

template <class Number>
Number at_least(const std::string& name, Number value, Number least) {
  TORCH_CHECK(value >= least, "'", name, "': expected at least ", least, ", got ", value);
  return value;
}

BatchSizes read_batch(JsonSection& root, int64_t world_size) {
  const auto positive = [&](const char* key) {
    const auto value = root.take<int64_t>(key);
    if (value) at_least<int64_t>(key, *value, 1);
    return value;
  };
  auto global = positive("train_batch_size");
  auto micro = positive("train_micro_batch_size_per_gpu");
  auto accumulation = positive("gradient_accumulation_steps");
  TORCH_CHECK(global || micro, "expected 'train_batch_size' or 'train_micro_batch_size_per_gpu', got neither");
  const auto divided = [&](int64_t by) {
    TORCH_CHECK(*global % by == 0, "'train_batch_size' is ", *global, ", which cannot be divided by ", by, " (", world_size,
                " ranks times the micro-batch or accumulation that is given)");
    return *global / by;
  };
  if (global && micro && !accumulation) accumulation = divided(*micro * world_size);
  if (!accumulation) accumulation = 1;
  if (global && !micro) micro = divided(*accumulation * world_size);
  if (!global) global = *micro * *accumulation * world_size;
  TORCH_CHECK(*global == *micro * *accumulation * world_size, "'train_batch_size' is ", *global, ", but ", *micro,
              " (train_micro_batch_size_per_gpu) times ", *accumulation, " (gradient_accumulation_steps) times ", world_size, " ranks is ",
              *micro * *accumulation * world_size);
  return {*global, *micro, *accumulation};
}

OptimizerConfig read_optimizer(JsonSection section) {
  OptimizerConfig config;
  config.type = one_of<OptimizerType>(section.name_of("type"), section.take_or<std::string>("type", "AdamW"),
                                      {{"AdamW", OptimizerType::ADAMW}, {"Adam", OptimizerType::ADAM}, {"SGD", OptimizerType::SGD}});
  if (auto params = section.take_section("params")) {
    const auto number = [&](const char* key, double& value) {
      if (const auto given = params->take<double>(key)) value = at_least(params->name_of(key), *given, 0.0);
    };
    number("lr", config.lr);
    number("weight_decay", config.weight_decay);
    if (config.type == OptimizerType::SGD) {
      number("momentum", config.momentum);
    } else {
      number("eps", config.eps);
      if (const auto betas = params->take<std::vector<double>>("betas")) {
        TORCH_CHECK(betas->size() == 2 && betas->at(0) >= 0 && betas->at(0) < 1 && betas->at(1) >= 0 && betas->at(1) < 1, "'",
                    params->name_of("betas"), "': expected two numbers from 0 to below 1, got ", json(*betas).dump());
        config.beta1 = betas->at(0);
        config.beta2 = betas->at(1);
      }
      // DeepSpeed's Adam decays like AdamW unless it is told otherwise.
      if (config.type == OptimizerType::ADAM && params->take_or("adam_w_mode", true)) config.type = OptimizerType::ADAMW;
    }
    config.no_decay = params->take_or<std::vector<std::string>>("no_decay", {});
    params->refuse_rest();
  }
  section.refuse_rest();
  return config;
}

WarmupSchedule read_schedule(JsonSection section, int64_t max_steps) {
  WarmupSchedule schedule;
  const auto type = section.take<std::string>("type");
  TORCH_CHECK(type, "expected '", section.name_of("type"), "': WarmupLR, WarmupDecayLR or WarmupCosineLR");
  schedule.type = one_of<ScheduleType>(
      section.name_of("type"), *type,
      {{"WarmupLR", ScheduleType::WARMUP}, {"WarmupDecayLR", ScheduleType::WARMUP_DECAY}, {"WarmupCosineLR", ScheduleType::WARMUP_COSINE}});
  schedule.total_steps = max_steps;
  if (auto params = section.take_section("params")) {
    const auto number = [&](const char* key, double& value) {
      if (const auto given = params->take<double>(key)) value = at_least(params->name_of(key), *given, 0.0);
    };
    schedule.warmup_steps =
        at_least<int64_t>(params->name_of("warmup_num_steps"), params->take_or("warmup_num_steps", schedule.warmup_steps), 0);
    schedule.warmup_type = one_of<WarmupType>(params->name_of("warmup_type"), params->take_or<std::string>("warmup_type", "log"),
                                              {{"log", WarmupType::LOG}, {"linear", WarmupType::LINEAR}});
    if (schedule.type != ScheduleType::WARMUP)
      schedule.total_steps = at_least<int64_t>(params->name_of("total_num_steps"), params->take_or("total_num_steps", max_steps), 1);
    if (schedule.type == ScheduleType::WARMUP_COSINE) {
      number("warmup_min_ratio", schedule.warmup_min_ratio);
      number("cos_min_ratio", schedule.cos_min_ratio);
    } else {
      number("warmup_min_lr", schedule.warmup_min_lr);
      number("warmup_max_lr", schedule.warmup_max_lr);
    }
    params->refuse_rest();
  }
  section.refuse_rest();
  return schedule;
}

LoraConfig read_lora(JsonSection section) {
  LoraConfig config;
  config.adapter = section.take_or<std::string>("adapter", "");
  if (config.adapter.empty()) {
    config.r = at_least<int64_t>(section.name_of("r"), section.take_or("r", config.r), 1);
    config.alpha = section.take_or("lora_alpha", config.alpha);
    TORCH_CHECK(config.alpha > 0, "'", section.name_of("lora_alpha"), "': expected more than 0, got ", config.alpha);
    config.dropout = section.take_or("lora_dropout", config.dropout);
    TORCH_CHECK(config.dropout >= 0 && config.dropout < 1, "'", section.name_of("lora_dropout"), "': expected 0 to below 1, got ",
                config.dropout);
    config.target_modules = section.take_or("target_modules", config.target_modules);
    TORCH_CHECK(!config.target_modules.empty(), "'", section.name_of("target_modules"), "' is empty");
  }
  section.refuse_rest();  // beside an adapter, which brings its own, so are the others
  return config;
}

void read_fp16(JsonSection section, TrainConfig& config) {
  if (section.take_or("enabled", false)) {
    TORCH_CHECK(config.dtype == ComputeDtype::FP32, "'fp16.enabled' and 'bf16.enabled' are both true; expected one of them");
    config.dtype = ComputeDtype::FP16;
  }
  auto& scale = config.loss_scale;
  scale.init_scale = std::exp2(static_cast<double>(
      at_least<int64_t>(section.name_of("initial_scale_power"), section.take_or<int64_t>("initial_scale_power", 16), 0)));
  scale.growth_interval =
      at_least<int64_t>(section.name_of("loss_scale_window"), section.take_or("loss_scale_window", scale.growth_interval), 1);
  scale.min_scale = section.take_or("min_loss_scale", scale.min_scale);
  TORCH_CHECK(scale.min_scale > 0, "'", section.name_of("min_loss_scale"), "': expected more than 0, got ", scale.min_scale);
  scale.hysteresis = at_least<int64_t>(section.name_of("hysteresis"), section.take_or("hysteresis", scale.hysteresis), 1);
  const double fixed = at_least(section.name_of("loss_scale"), section.take_or("loss_scale", 0.0), 0.0);
  if (fixed > 0) {
    scale.init_scale = fixed;
    scale.dynamic = false;
  }
  section.refuse_rest();
}

// The document without what may change when a run goes on.
std::string fingerprint_of(json document, const TrainConfig& config) {
  for (const char* key : {"max_steps", "eval_every", "save_every", "resume", "output_dir", "metrics_file", "train_micro_batch_size_per_gpu",
                          "gradient_accumulation_steps", "zero_optimization"})
    document.erase(key);
  document["train_batch_size"] = config.batch.global;
  document["model"].erase("path");
  for (const char* key : {"train", "validation"}) document["data"].erase(key);
  if (document.contains("lora") && document["lora"].is_object()) document["lora"].erase("adapter");
  return document.dump();
}

}  // namespace

TrainConfig read_train_config(const std::string& json_text, const std::vector<std::string>& overrides, int world_size) {
  json document = parse_strictly(json_text);
  for (const auto& each : overrides) set_override(document, each);
  JsonSection root(document, "");
  TrainConfig config;

  auto model = root.take_section("model");
  TORCH_CHECK(model, "expected 'model' with 'path' or 'config'");
  config.model_path = model->take_or<std::string>("path", "");
  const auto* architecture = model->take_json("config");
  TORCH_CHECK((architecture != nullptr) == config.model_path.empty(),
              "expected either 'model.path', a folder as Hugging Face writes it, or ",
              "'model.config', an object as in its config.json, got ", architecture ? "both" : "neither");
  if (architecture) {
    TORCH_CHECK(architecture->is_object(), "expected 'model.config' to be an object, got ", architecture->dump());
    config.model_config = architecture->dump();
  }
  model->refuse_rest();

  auto data = root.take_section("data");
  TORCH_CHECK(data, "expected 'data' with 'train' and 'seq_len'");
  const auto train = data->take<std::string>("train");
  const auto seq_len = data->take<int64_t>("seq_len");
  TORCH_CHECK(train, "expected 'data.train', a file of tokens or of batches");
  config.train = *train;
  config.validation = data->take_or<std::string>("validation", "");
  const auto is_batches = [](const std::string& path) { return path.empty() || path.ends_with(".safetensors"); };
  if (is_batches(config.train) && is_batches(config.validation)) {
    TORCH_CHECK(!seq_len, "'data.seq_len' is ", *seq_len, ", but the rows of .safetensors files have a length of their own; leave it out");
  } else {
    TORCH_CHECK(seq_len, "expected 'data.seq_len', the number of targets in a row");
  }
  if (seq_len) config.seq_len = at_least<int64_t>("data.seq_len", *seq_len, 1);
  data->refuse_rest();

  const auto max_steps = root.take<int64_t>("max_steps");
  TORCH_CHECK(max_steps, "expected 'max_steps', the number of optimizer steps");
  config.max_steps = at_least<int64_t>("max_steps", *max_steps, 1);
  config.seed = at_least<int64_t>("seed", root.take_or<int64_t>("seed", 0), 0);
  config.eval_every = at_least<int64_t>("eval_every", root.take_or<int64_t>("eval_every", 0), 0);
  config.output_dir = root.take_or<std::string>("output_dir", "");
  config.save_every = at_least<int64_t>("save_every", root.take_or<int64_t>("save_every", 0), 0);
  config.resume = root.take_or<std::string>("resume", "");
  TORCH_CHECK(!config.output_dir.empty() || (config.save_every == 0 && config.resume != "auto"),
              "expected 'output_dir', which 'save_every' and 'resume': \"auto\" refer to");
  config.metrics_file = root.take_or<std::string>("metrics_file", "");
  config.batch = read_batch(root, world_size);
  if (auto section = root.take_section("optimizer")) config.optimizer = read_optimizer(*section);
  if (auto section = root.take_section("scheduler")) config.schedule = read_schedule(*section, config.max_steps);
  if (auto section = root.take_section("bf16")) {
    if (section->take_or("enabled", false)) config.dtype = ComputeDtype::BF16;
    section->refuse_rest();
  }
  if (auto section = root.take_section("fp16")) read_fp16(*section, config);
  if (auto section = root.take_section("lora")) config.lora = read_lora(*section);
  config.gradient_clipping = at_least("gradient_clipping", root.take_or("gradient_clipping", 0.0), 0.0);
  if (auto section = root.take_section("zero_optimization")) {
    if (const auto stage = section->take<int64_t>("stage")) {
      TORCH_CHECK(*stage == 2 || *stage == 3, "'zero_optimization.stage': expected 2 or 3, got ", *stage);
      config.zero_stage = *stage;
      config.zero_stage_given = true;
    }
    if (const auto live = section->take<int64_t>("stage3_max_live_parameters"))
      config.max_live_parameters = at_least<int64_t>("zero_optimization.stage3_max_live_parameters", *live, 1);
    section->refuse_rest();
  }
  root.refuse_rest();
  config.fingerprint = fingerprint_of(document, config);
  return config;
}

}  // namespace fsdp::tools
