#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/lora.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include "adapters/lora_adapter.h"
#include "comm/agreement.h"
#include "plan/registered_parameters.h"
#include "runtime/access_key.h"
#include "runtime/flat_views.h"
#include "runtime/registry.h"

namespace fsdp::lora {
namespace {

namespace nn = torch::nn;

struct Target {
  std::string path;
  std::shared_ptr<nn::Module> held;  // null for a root on the stack
  nn::Module* module = nullptr;
  at::Tensor weight;
  int64_t in = 0, out = 0;
  bool fan_in_first = false;
};

using ShapeOf = std::function<std::vector<int64_t>(const at::Tensor&)>;

bool matches(std::string_view path, std::string_view pattern) {
  return path == pattern || (path.size() > pattern.size() && path.ends_with(pattern) && path[path.size() - pattern.size() - 1] == '.');
}

bool is_linear(const nn::Module& module) { return dynamic_cast<const nn::LinearImpl*>(&module) != nullptr; }

bool is_chosen(const std::string& path, const nn::Module& module, std::string_view pattern) {
  return pattern == kAllLinear ? is_linear(module) && !matches(path, "lm_head") : matches(path, pattern);
}

void check_options(const LoraOptions& options) {
  TORCH_CHECK(options.r >= 1, "lora::attach: r must be at least 1, got ", options.r);
  TORCH_CHECK(std::isfinite(options.alpha) && options.alpha > 0, "lora::attach: alpha must be positive and finite, got ", options.alpha);
  TORCH_CHECK(options.dropout >= 0 && options.dropout < 1, "lora::attach: dropout must be at least 0 and below 1, got ", options.dropout);
  TORCH_CHECK(c10::isFloatingType(options.dtype), "lora::attach: dtype must be a floating one, got ", options.dtype);
  TORCH_CHECK(!options.target_modules.empty(), "lora::attach: target_modules is empty; name ends of module paths, or \"", kAllLinear, "\"");
}

struct PathAndModule {
  std::string path;
  nn::Module* module;
  std::shared_ptr<nn::Module> held;
};

// Each module once.
std::vector<PathAndModule> modules_of(nn::Module& root) {
  std::vector<PathAndModule> modules{{"", &root, nullptr}};
  std::set<nn::Module*> seen{&root};
  for (const auto& item : root.named_modules("", /*include_self=*/false))
    if (seen.insert(item.value().get()).second) modules.push_back({item.key(), item.value().get(), item.value()});
  return modules;
}

Target as_target(const PathAndModule& from, const LoraOptions& options, const ShapeOf& shape_of) {
  const auto& [path, module, held] = from;
  const auto& parameters = RegisteredParameters::of(*module);
  const auto* weight = parameters.find("weight");
  const auto refuse = [&](const std::string& why) {
    TORCH_CHECK(false, "lora::attach: target '", path, "' (", module->name(), ") ", why,
                ". A target is a torch::nn::Linear, or another module with a parameter 'weight' of two dimensions that it multiplies by");
  };
  if (!weight || !weight->defined()) refuse("has no parameter 'weight' of its own");
  if (dynamic_cast<nn::EmbeddingImpl*>(module) || dynamic_cast<nn::EmbeddingBagImpl*>(module))
    refuse("looks rows up instead of multiplying");
  const auto shape = shape_of(*weight);
  if (shape.size() != 2) refuse(fmt::format("has a weight of shape [{}]", fmt::join(shape, ", ")));
  TORCH_CHECK(weight->is_floating_point(), "lora::attach: the weight of target '", path, "' has dtype ", weight->scalar_type(),
              "; expected a floating one");
  TORCH_CHECK(!watched_weights::observer_of(*weight) && !parameters.contains(kA) && !parameters.contains(kB), "lora::attach: target '",
              path, "' has an adapter already");
  TORCH_CHECK(options.dropout == 0 || !module->weak_from_this().expired(), "lora::attach: dropout asks whether target '", path,
              "' is training, which only a module held by a shared_ptr or a holder can be asked later. Make it so, or set dropout to 0");
  Target target{path, held, module, *weight};
  target.fan_in_first = !is_linear(*module) && options.fan_in_fan_out;
  target.in = shape[target.fan_in_first ? 0 : 1];
  target.out = shape[target.fan_in_first ? 1 : 0];
  return target;
}

std::vector<Target> find_targets(nn::Module& root, const LoraOptions& options, const ShapeOf& shape_of) {
  check_options(options);
  const auto modules = modules_of(root);
  std::map<const c10::TensorImpl*, std::vector<std::string>> registered;
  for (const auto& each : modules)
    for (const auto& item : RegisteredParameters::of(*each.module))
      if (item.value().defined()) registered[item.value().unsafeGetTensorImpl()].push_back(each.path);
  for (const auto& pattern : options.target_modules) {
    if (std::any_of(modules.begin(), modules.end(), [&](const auto& each) { return is_chosen(each.path, *each.module, pattern); }))
      continue;
    std::vector<std::string> linears;
    for (const auto& each : modules)
      if (is_linear(*each.module)) linears.push_back(each.path);
    TORCH_CHECK(false, "lora::attach: no module's path ends in '", pattern,
                "'; the torch::nn::Linear modules are: ", linears.empty() ? "none" : fmt::format("{}", fmt::join(linears, ", ")));
  }
  std::vector<Target> targets;
  for (const auto& each : modules) {
    if (std::none_of(options.target_modules.begin(), options.target_modules.end(),
                     [&](const auto& pattern) { return is_chosen(each.path, *each.module, pattern); }))
      continue;
    targets.push_back(as_target(each, options, shape_of));
    const auto& owners = registered[targets.back().weight.unsafeGetTensorImpl()];
    TORCH_CHECK(owners.size() == 1, "lora::attach: the weight of target '", each.path, "' is shared by modules '",
                fmt::format("{}", fmt::join(owners, "', '")), "'; an adapter on it would change them all. Choose other target_modules");
  }
  return targets;
}

// Registers A and B; they are not watched for yet.
std::vector<at::Tensor> register_adapter(const Target& target, const LoraOptions& options) {
  c10::AutoGradMode no_grad(false);
  const double bound = 1 / std::sqrt(static_cast<double>(target.in));
  auto a = at::empty({options.r, target.in}, at::dtype(options.dtype).device(target.weight.device())).uniform_(-bound, bound);
  auto b = at::zeros({target.out, options.r}, a.options());
  return {target.module->register_parameter(kA, a, /*requires_grad=*/true), target.module->register_parameter(kB, b, true)};
}

void watch(const Target& target, const LoraOptions& options) {
  watched_weights::watch(target.weight, std::make_shared<LoraAdapter>(*target.module, options, target.fan_in_first), target.in, target.out,
                         target.fan_in_first);
}

void freeze_all_but_adapters(const nn::Module& root) {
  std::set<const c10::TensorImpl*> adapters;
  for (const auto& each : adapted_modules(root))
    for (const auto& parameter : {each.adapter->a(), each.adapter->b()}) adapters.insert(parameter.unsafeGetTensorImpl());
  for (auto& parameter : root.parameters())
    if (!adapters.contains(parameter.unsafeGetTensorImpl())) parameter.set_requires_grad(false);
}

nn::Module& inner(FullyShardedBase& model) {
  detail::sharded_model(model);  // throws after unwrap
  return *model.children().front();
}

// Throws where some are merged and some not, or all are what they shall become.
std::vector<AdaptedModule> to_merge(const nn::Module& root, bool merges) {
  auto adapted = adapted_modules(root);
  const char* who = merges ? "lora::merge" : "lora::unmerge";
  TORCH_CHECK(!adapted.empty(), who, ": the module has no adapters");
  for (const auto& each : adapted)
    TORCH_CHECK(each.adapter->merged != merges, who, ": the adapter of '", each.path, merges ? "' is merged already" : "' is not merged");
  return adapted;
}

void set_merged(nn::Module& module, bool merges) {
  if (auto* wrapper = dynamic_cast<FullyShardedBase*>(&module)) return merges ? merge(*wrapper) : unmerge(*wrapper);
  const auto adapted = to_merge(module, merges);
  for (const auto& each : adapted)
    for (const auto& parameter : {each.weight, each.adapter->a(), each.adapter->b()})
      TORCH_CHECK(!registry::is_sharded(parameter), "lora::merge, unmerge: the parameters of '", each.path,
                  "' are sharded; call it on the wrapper");
  c10::AutoGradMode no_grad(false);
  for (const auto& each : adapted) {
    const auto delta = each.adapter->delta(each.adapter->a(), each.adapter->b());
    at::Tensor(each.weight).add_(delta.to(each.weight.scalar_type()), merges ? 1 : -1);
    each.adapter->merged = merges;
  }
}

struct Place {
  size_t group = 0, parameter = 0;
};

std::map<const c10::TensorImpl*, Place> places_in(const FlatViews& views) {
  std::map<const c10::TensorImpl*, Place> places;
  for (size_t g = 0; g < views.groups().size(); ++g)
    for (size_t p = 0; p < views.groups()[g].parameters.size(); ++p)
      places[views.groups()[g].parameters[p].handle.unsafeGetTensorImpl()] = {g, p};
  return places;
}

void set_merged(FullyShardedBase& model, bool merges) {
  FlatViews views(detail::sharded_model(model));
  std::vector<AdaptedModule> adapted;
  const auto refusal = comm::refusal_of([&] {
    adapted = to_merge(inner(model), merges);
    views.settle("lora::merge or unmerge");
  });
  comm::exchange_or_refuse(views.collectives(), merges ? "lora::merge" : "lora::unmerge", "", refusal, "merge or unmerge its adapters");

  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  const auto places = places_in(views);
  std::map<size_t, std::vector<at::Tensor>> gathered;  // sharded adapters' groups
  const auto whole = [&](const at::Tensor& parameter) {
    const auto place = places.at(parameter.unsafeGetTensorImpl());
    if (!gathered.contains(place.group))
      gathered[place.group] = views.whole(place.group, views.groups()[place.group].shard, "adapters to merge");
    return gathered[place.group][place.parameter];
  };
  for (const auto& each : adapted) {
    const auto delta = each.adapter->delta(whole(each.adapter->a()), whole(each.adapter->b()));
    const auto place = places.at(each.weight.unsafeGetTensorImpl());
    const auto& group = views.groups()[place.group];
    const auto& view = group.parameters[place.parameter];
    group.shard.narrow(0, view.begin, view.length).add_(view.slice_of(delta).to(group.shard.scalar_type()), merges ? 1 : -1);
    views.were_written(place.group, {place.parameter});
    each.adapter->merged = merges;
  }
}

std::string report(int64_t trainable, int64_t all, size_t adapters) {
  return fmt::format("{} of {} parameters train ({:.2f} %), in {} adapters", fmt::group_digits(trainable), fmt::group_digits(all),
                     100.0 * static_cast<double>(trainable) / static_cast<double>(std::max<int64_t>(1, all)), adapters);
}

}  // namespace

std::vector<at::Tensor> attach(nn::Module& module, const LoraOptions& options) {
  if (auto* wrapper = dynamic_cast<FullyShardedBase*>(&module)) return attach(*wrapper, options);
  const auto targets = find_targets(module, options, [](const at::Tensor& weight) {
    TORCH_CHECK(!registry::is_sharded(weight), "lora::attach: the module is sharded; attach to the wrapper, lora::attach(model, ...), or ",
                "before wrapping");
    return weight.sizes().vec();
  });
  std::vector<at::Tensor> parameters;
  for (const auto& target : targets) {
    for (auto& each : register_adapter(target, options)) parameters.push_back(std::move(each));
    watch(target, options);
  }
  freeze_all_but_adapters(module);
  return parameters;
}

std::vector<at::Tensor> attach(FullyShardedBase& model, const LoraOptions& options) {
  FlatViews views(detail::sharded_model(model));
  const auto places = places_in(views);
  const auto whole_shape = [&](const at::Tensor& weight) {
    const auto place = places.find(weight.unsafeGetTensorImpl());
    return place == places.end() ? weight.sizes().vec() : views.groups()[place->second.group].parameters[place->second.parameter].shape;
  };
  std::vector<Target> targets;
  std::string text;
  const auto refusal = comm::refusal_of([&] {
    targets = find_targets(inner(model), options, whole_shape);
    views.settle("lora::attach");
    text = fmt::format("r {}, alpha {}, dropout {}, rank_stabilized {}, {} to", options.r, options.alpha, options.dropout,
                       options.rank_stabilized, c10::toString(options.dtype));
    for (const auto& target : targets) text += fmt::format(" {} ({} to {})", target.path, target.in, target.out);
  });
  const auto texts = comm::exchange_or_refuse(views.collectives(), "lora::attach", text, refusal, "attach adapters");
  for (size_t rank = 0; rank < texts.size(); ++rank)
    TORCH_CHECK(texts[rank] == text, "rank ", views.rank(), ": lora::attach: the ranks attach different adapters: this one ", text,
                "; rank ", rank, " ", texts[rank]);

  std::vector<std::pair<std::string, at::Tensor>> named;
  std::vector<at::Tensor> parameters;
  for (const auto& target : targets) {
    const std::string prefix = target.path.empty() ? "" : target.path + ".";
    auto registered = register_adapter(target, options);
    named.emplace_back(prefix + kA, registered[0]);
    named.emplace_back(prefix + kB, registered[1]);
    parameters.insert(parameters.end(), registered.begin(), registered.end());
  }
  detail::add_unsharded(model, named);
  for (const auto& target : targets) watch(target, options);
  freeze_all_but_adapters(inner(model));
  return parameters;
}

void merge(nn::Module& module) { set_merged(module, true); }
void unmerge(nn::Module& module) { set_merged(module, false); }
void merge(FullyShardedBase& model) { set_merged(model, true); }
void unmerge(FullyShardedBase& model) { set_merged(model, false); }

std::string trainable_report(const nn::Module& module) {
  if (const auto* wrapper = dynamic_cast<const FullyShardedBase*>(&module)) return trainable_report(*wrapper);
  std::set<const c10::TensorImpl*> seen;
  int64_t trainable = 0, all = 0;
  for (const auto& parameter : module.parameters()) {
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    all += parameter.numel();
    if (parameter.requires_grad()) trainable += parameter.numel();
  }
  return report(trainable, all, adapted_modules(module).size());
}

std::string trainable_report(const FullyShardedBase& model) {
  const FlatViews views(detail::sharded_model(model));
  int64_t trainable = 0, all = 0;
  for (const auto& group : views.groups())
    for (const auto& parameter : group.parameters) {
      int64_t numel = 1;
      for (const auto size : parameter.shape) numel *= size;
      all += numel;
      if (parameter.handle.requires_grad()) trainable += numel;
    }
  return report(trainable, all, adapted_modules(*model.children().front()).size());
}

}  // namespace fsdp::lora
