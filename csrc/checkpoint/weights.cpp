#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/weights.h>

#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <set>

#include "checkpoint/weight_files.h"
#include "comm/agreement.h"
#include "plan/module_tree.h"
#include "runtime/access_key.h"
#include "runtime/flat_views.h"
#include "runtime/registry.h"

namespace fsdp {
namespace {

// One tensor of a model as the files see it.
struct Weight {
  std::vector<std::string> names;  // the first is the model's own
  c10::ScalarType dtype;
  std::vector<int64_t> shape;
  at::Tensor whole;                 // where every rank has all of it: plain parameters and buffers
  size_t group = 0, parameter = 0;  // in the flat views otherwise
};

Weight whole_weight(std::vector<std::string> names, const at::Tensor& tensor) {
  return {std::move(names), tensor.scalar_type(), tensor.sizes().vec(), tensor};
}

std::vector<Weight> weights_of(const torch::nn::Module& module) {
  std::vector<Weight> weights;
  const ModuleTree tree = walk_modules(module);
  for (const auto& parameter : tree.parameters) {
    std::vector<std::string> names;
    for (const auto& registration : parameter.registrations) names.push_back(registration.name);
    TORCH_CHECK(!registry::is_sharded(parameter.tensor), "parameter '", names.front(),
                "' is sharded; load and save weights through the wrapper");
    weights.push_back(whole_weight(std::move(names), parameter.tensor));
  }
  for (const auto& buffer : tree.buffers) weights.push_back(whole_weight({buffer.name}, buffer.tensor));
  return weights;
}

std::vector<Weight> weights_of(const FullyShardedBase& model, const FlatViews& views) {
  std::map<std::string, std::vector<std::string>> other_names;
  for (const auto& unit : model.plan().units)
    for (const auto& group : unit.groups)
      for (const auto& parameter : group.parameters) other_names[parameter.name] = parameter.other_names;
  std::vector<Weight> weights;
  for (size_t g = 0; g < views.groups().size(); ++g) {
    const auto& group = views.groups()[g];
    for (size_t p = 0; p < group.parameters.size(); ++p) {
      const auto& view = group.parameters[p];
      Weight weight{{view.name}, group.shard.scalar_type(), view.shape, {}, g, p};
      const auto& others = other_names[view.name];
      weight.names.insert(weight.names.end(), others.begin(), others.end());
      weights.push_back(std::move(weight));
    }
  }
  for (const auto& buffer : model.named_buffers()) weights.push_back(whole_weight({buffer.key()}, buffer.value()));
  return weights;
}

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

// For each weight what fills it; throws with everything that does not fit.
std::vector<WeightInFile> match(const std::vector<Weight>& weights, const WeightFiles& files, const LoadWeightsOptions& options) {
  std::vector<WeightInFile> sources;
  std::vector<std::string> missing, unexpected, different;
  std::set<std::string> used;
  for (const auto& weight : weights) {
    sources.emplace_back();
    if (options.skip && options.skip(weight.names.front())) continue;
    for (const auto& name : weight.names) {
      const auto found = files.weights().find(options.rename ? options.rename(name) : name);
      if (found == files.weights().end()) continue;
      used.insert(found->first);
      if (!sources.back().entry) sources.back() = found->second;
    }
    const auto* entry = sources.back().entry;
    if (!entry)
      missing.push_back(weight.names.front());
    else if (entry->shape != weight.shape)
      different.push_back(
          fmt::format("{} is {} in the file, {} in the model", entry->name, shape_text(entry->shape), shape_text(weight.shape)));
    else if (c10::isFloatingType(entry->dtype) != c10::isFloatingType(weight.dtype))
      different.push_back(
          fmt::format("{} is {} in the file, {} in the model", entry->name, c10::toString(entry->dtype), c10::toString(weight.dtype)));
  }
  for (const auto& [name, _] : files.weights())
    if (!used.contains(name) && !(options.ignore && options.ignore(name))) unexpected.push_back(name);
  std::string problems;
  const auto list = [&](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) problems += fmt::format("\n  {}: {}", title, fmt::join(names, ", "));
  };
  if (options.strict) {
    list("not in the files", missing);
    list("not in the model", unexpected);
  }
  list("different", different);
  TORCH_CHECK(problems.empty(), "the weights in '", files.path(), "' do not fit the model:", problems);
  return sources;
}

void fill_whole(const at::Tensor& tensor, const WeightInFile& source) {
  if (tensor.is_contiguous() && tensor.device().is_cpu()) return source.file->read(*source.entry, 0, tensor.detach());
  tensor.detach().copy_(source.file->read(source.entry->name));
}

void fill_slice(const FlatGroupView& group, const ParameterView& view, const WeightInFile& source) {
  if (view.length == 0) return;
  const auto slice = group.shard.narrow(0, view.begin, view.length);
  if (view.memory_order.empty()) return source.file->read(*source.entry, view.begin_in_parameter, slice);
  slice.copy_(view.slice_of(source.file->read(source.entry->name)));
}

std::vector<SafetensorsEntry> entries_of(const std::vector<Weight>& weights, const SaveWeightsOptions& options) {
  std::vector<SafetensorsEntry> entries;
  for (const auto& weight : weights) {
    const bool converts = options.dtype && c10::isFloatingType(weight.dtype);
    entries.push_back({options.rename ? options.rename(weight.names.front()) : weight.names.front(),
                       converts ? *options.dtype : weight.dtype, weight.shape, 0});
  }
  return entries;
}

void drop_skipped(std::vector<Weight>& weights, const ParameterPredicate& skip) {
  if (skip) std::erase_if(weights, [&](const Weight& weight) { return skip(weight.names.front()); });
}

// Calls use(weight, tensor) for every weight, whole, in order, with no more than one flat group gathered. All ranks must call.
template <class Use>
void visit_whole(FlatViews& views, const std::vector<Weight>& weights, Use use) {
  std::optional<size_t> group;
  std::vector<at::Tensor> gathered;
  for (const auto& weight : weights) {
    if (weight.whole.defined()) {
      use(weight, weight.whole);
      continue;
    }
    if (group != weight.group) {
      group = weight.group;
      gathered.clear();
      gathered = views.whole(*group, views.groups()[*group].shard, "saving");
    }
    use(weight, gathered[weight.parameter]);
  }
}

}  // namespace

void load_weights(torch::nn::Module& module, const std::string& path, const LoadWeightsOptions& options) {
  if (auto* wrapper = dynamic_cast<FullyShardedBase*>(&module)) return load_weights(*wrapper, path, options);
  const auto weights = weights_of(module);
  const WeightFiles files(path);
  const auto sources = match(weights, files, options);
  c10::AutoGradMode no_grad(false);
  for (size_t i = 0; i < weights.size(); ++i)
    if (sources[i].entry) fill_whole(weights[i].whole, sources[i]);
}

void load_weights(FullyShardedBase& model, const std::string& path, const LoadWeightsOptions& options) {
  FlatViews views(detail::sharded_model(model));
  const auto weights = weights_of(model, views);
  std::optional<WeightFiles> files;
  std::vector<WeightInFile> sources;
  const auto refusal = comm::refusal_of([&] {
    files.emplace(path);
    sources = match(weights, *files, options);
    views.settle("load_weights");
  });
  comm::exchange_or_refuse(views.collectives(), "loading weights", "", refusal, "load its weights");

  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  const auto failure = comm::refusal_of([&] {
    for (size_t i = 0; i < weights.size(); ++i) {
      if (!sources[i].entry) continue;
      const auto& group = views.groups()[weights[i].group];
      weights[i].whole.defined() ? fill_whole(weights[i].whole, sources[i])
                                 : fill_slice(group, group.parameters[weights[i].parameter], sources[i]);
    }
  });
  for (size_t i = 0; i < weights.size(); ++i)
    if (sources[i].entry && !weights[i].whole.defined()) views.were_written(weights[i].group, {weights[i].parameter});
  comm::exchange_or_refuse(views.collectives(), "weights loaded", "", failure.empty() ? "" : failure + ". The model is partly loaded",
                           "load its weights");
}

void save_weights(const torch::nn::Module& module, const std::string& path, const SaveWeightsOptions& options) {
  if (const auto* wrapper = dynamic_cast<const FullyShardedBase*>(&module)) return save_weights(*wrapper, path, options);
  auto weights = weights_of(module);
  drop_skipped(weights, options.skip);
  WeightFilesWriter writer(path, entries_of(weights, options), options.max_file_bytes);
  for (const auto& weight : weights) writer.append(weight.whole);
  writer.finish();
}

void save_weights(const FullyShardedBase& model, const std::string& path, const SaveWeightsOptions& options) {
  FlatViews views(detail::sharded_model(model));
  auto weights = weights_of(model, views);
  std::unique_ptr<WeightFilesWriter> writer;
  const auto refusal = comm::refusal_of([&] {
    drop_skipped(weights, options.skip);
    views.settle("save_weights");
    if (views.rank() == 0) writer = std::make_unique<WeightFilesWriter>(path, entries_of(weights, options), options.max_file_bytes);
  });
  comm::exchange_or_refuse(views.collectives(), "saving weights", "", refusal, "save its weights");

  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  std::string failure;  // rank 0's; the gathers go on all the same, or the others would wait
  visit_whole(views, weights, [&](const Weight&, const at::Tensor& tensor) {
    if (writer && failure.empty()) failure = comm::refusal_of([&] { writer->append(tensor); });
  });
  if (writer && failure.empty()) failure = comm::refusal_of([&] { writer->finish(); });
  writer.reset();
  comm::exchange_or_refuse(views.collectives(), "weights saved", "", failure, "save its weights");
}

std::vector<std::pair<std::string, at::Tensor>> full_state_dict(const FullyShardedBase& model) {
  FlatViews views(detail::sharded_model(model));
  const auto weights = weights_of(model, views);
  const auto refusal = comm::refusal_of([&] { views.settle("full_state_dict"); });
  comm::exchange_or_refuse(views.collectives(), "full_state_dict", "", refusal, "give its state");
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  std::vector<std::pair<std::string, at::Tensor>> state;
  visit_whole(views, weights, [&](const Weight& weight, const at::Tensor& tensor) {
    if (views.rank() == 0) state.emplace_back(weight.names.front(), weight.whole.defined() ? tensor.detach().clone() : tensor);
  });
  return state;
}

}  // namespace fsdp
