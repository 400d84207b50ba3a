#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/empty.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fsdp/checkpoint.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/safetensors.h>
#include <torch/version.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/file_io.h"
#include "checkpoint/manifest.h"
#include "checkpoint/optimizer_access.h"
#include "comm/agreement.h"
#include "runtime/access_key.h"
#include "runtime/flat_views.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRandom = "random";

// One logical tensor and what this rank holds of it.
struct Piece {
  std::string name;
  at::Tensor memory;           // (length), this rank's elements in memory order; of_each_rank: all of it
  std::vector<int64_t> shape;  // whole
  std::vector<int64_t> order;
  int64_t begin = 0;
  bool of_each_rank = false;
  bool saved_here = true;  // by this rank
};

struct Place {
  size_t group = 0, parameter = 0;
};

at::Tensor random_state() { return at::detail::getDefaultCPUGenerator().get_state(); }

// Everything that a run is made of, in one order on all ranks.
class Contents {
 public:
  explicit Contents(const FullyShardedBase& model) : views_(detail::sharded_model(model)) {
    for (size_t g = 0; g < views_.groups().size(); ++g) {
      const auto& group = views_.groups()[g];
      for (size_t p = 0; p < group.parameters.size(); ++p) {
        places_[group.parameters[p].name] = {g, p};
        model_.push_back(piece_of("model/" + group.parameters[p].name, {g, p}, slice_in(group.shard, group.parameters[p])));
      }
    }
    for (const auto& buffer : model.named_buffers()) own_.push_back(whole("buffer/" + buffer.key(), buffer.value()));
    own_.push_back(whole(kRandom, random_state()));
  }

  FlatViews& views() { return views_; }
  int rank() const { return views_.rank(); }
  int world_size() const { return views_.collectives().world_size(); }
  const std::vector<Piece>& model() const { return model_; }
  const std::vector<Piece>& own() const { return own_; }  // of each rank
  const std::map<std::string, Place>& places() const { return places_; }
  OptimizerAccess::Parameters parameters() const {
    OptimizerAccess::Parameters parameters;
    for (const auto& group : views_.groups())
      for (const auto& view : group.parameters) parameters.push_back(&view);
    return parameters;
  }

  std::vector<Piece> optimizer(const std::vector<OptimizerEntry>& entries) const {
    std::vector<Piece> pieces;
    for (const auto& entry : entries)
      for (const auto& [name, slice] : entry.slices)
        pieces.push_back(piece_of(fmt::format("optimizer/{}/{}", entry.parameter, name), places_.at(entry.parameter), slice));
    return pieces;
  }

 private:
  static at::Tensor slice_in(const at::Tensor& flat, const ParameterView& view) { return flat.narrow(0, view.begin, view.length); }

  Piece piece_of(std::string name, Place place, const at::Tensor& memory) const {
    const auto& group = views_.groups()[place.group];
    const auto& view = group.parameters[place.parameter];
    return {std::move(name),
            memory,
            view.shape,
            view.memory_order,
            view.begin_in_parameter,
            false,
            view.length > 0 && (!group.replicated || rank() == 0)};
  }

  static Piece whole(std::string name, const at::Tensor& tensor) {
    return {std::move(name), tensor, tensor.sizes().vec(), {}, 0, true, true};
  }

  FlatViews views_;
  std::vector<Piece> model_, own_;
  std::map<std::string, Place> places_;
};

std::string hash_of(const at::Tensor& contiguous) {
  return comm::hash_of({static_cast<const char*>(contiguous.const_data_ptr()), static_cast<size_t>(contiguous.nbytes())});
}

at::Tensor on_host(const at::Tensor& tensor) { return tensor.detach().to(at::kCPU).contiguous(); }

std::string file_name(int rank) { return fmt::format("rank-{:05d}.safetensors", rank); }

// The header is everything before the data of the first tensor.
std::string header_hash(const std::string& path, const SafetensorsFile& file) {
  int64_t bytes = 0, data = 0;
  for (const auto& entry : file.entries()) data += entry.bytes();
  const int opened = open_regular(path, bytes);
  std::string header(static_cast<size_t>(bytes - data), '\0');
  try {
    read_exactly(opened, path, 0, header.data(), header.size());
  } catch (...) {
    ::close(opened);
    throw;
  }
  ::close(opened);
  return comm::hash_of(header);
}

RankReport write_rank_file(const std::string& folder, int rank, const std::vector<Piece>& pieces, const std::string& nonce) {
  RankReport report;
  std::vector<SafetensorsEntry> entries;
  for (const auto& piece : pieces) entries.push_back({piece.name, piece.memory.scalar_type(), {piece.memory.numel()}, 0});
  report.file.name = file_name(rank);
  const auto path = (fs::path(folder) / report.file.name).string();
  SafetensorsWriter writer(path, entries, {{"nonce", nonce}, {"rank", std::to_string(rank)}});
  for (const auto& piece : pieces) {
    const auto values = on_host(piece.memory).view({-1});
    report.parts[piece.name] = {rank, piece.begin, values.numel(), hash_of(values)};
    writer.append(values);
  }
  writer.finish();
  report.file.bytes = static_cast<int64_t>(fs::file_size(path));
  report.file.header_hash = header_hash(path, SafetensorsFile(path));
  return report;
}

std::string dtype_text(const at::Tensor& tensor) { return c10::toString(tensor.scalar_type()); }

std::string new_nonce() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}", source(), source());
}

// What this rank saves, and of all ranks' reports one manifest.
std::vector<Piece> saved_here(const std::vector<std::vector<Piece>>& all) {
  std::vector<Piece> pieces;
  for (const auto& each : all)
    for (const auto& piece : each)
      if (piece.saved_here) pieces.push_back(piece);
  return pieces;
}

void put_together(Manifest& manifest, const std::vector<std::vector<Piece>>& all, const std::vector<RankReport>& reports) {
  for (const auto& pieces : all)
    for (const auto& piece : pieces) {
      ManifestTensor tensor{dtype_text(piece.memory), piece.shape, piece.order, piece.of_each_rank, {}};
      for (const auto& report : reports)
        if (const auto part = report.parts.find(piece.name); part != report.parts.end()) tensor.parts.push_back(part->second);
      manifest.tensors.emplace(piece.name, std::move(tensor));
    }
  for (const auto& report : reports) manifest.files.push_back(report.file);
}

int64_t bytes_of(const std::vector<Piece>& pieces) {
  int64_t bytes = 0;
  for (const auto& piece : pieces) bytes += static_cast<int64_t>(piece.memory.nbytes());
  return bytes;
}

// A checkpoint's files, checked: of what is read, every byte has the hash that the manifest says.
class Source {
 public:
  Source(std::string path, int rank) : path_(std::move(path)), manifest_(read_manifest(path_)), rank_(rank) {
    files_.resize(manifest_.files.size());
  }
  const Manifest& manifest() const { return manifest_; }

  // The elements of `piece` into `to`, (length), of another floating dtype where it must be. `to` undefined: they are only checked.
  void read(const Piece& piece, const at::Tensor& to) {
    const auto& tensor = manifest_.tensors.at(piece.name);
    if (tensor.of_each_rank) {
      const auto& part = tensor.parts[manifest_.world_size > rank_ && same_world_ ? static_cast<size_t>(rank_) : 0];
      const auto values = part_of(piece.name, part);
      if (to.defined()) to.copy_(values.view(to.sizes()));
      return;
    }
    if (tensor.order != piece.order) return read_reordered(piece, tensor, to);
    const int64_t end = piece.begin + piece.memory.numel();
    for (const auto& part : tensor.parts) {
      const int64_t from = std::max(part.begin, piece.begin), until = std::min(part.begin + part.length, end);
      if (from >= until) continue;
      const auto values = part_of(piece.name, part);
      if (to.defined()) to.narrow(0, from - piece.begin, until - from).copy_(values.narrow(0, from - part.begin, until - from));
    }
  }

  void set_world_size(int world_size) { same_world_ = world_size == manifest_.world_size; }
  bool same_world() const { return same_world_; }

 private:
  // Saved in another order of memory than the model has it now.
  void read_reordered(const Piece& piece, const ManifestTensor& tensor, const at::Tensor& to) {
    std::vector<at::Tensor> parts;
    for (const auto& part : tensor.parts) parts.push_back(part_of(piece.name, part));
    if (!to.defined() || to.numel() == 0) return;
    const auto in_order = [](const std::vector<int64_t>& order, size_t dims) {
      std::vector<int64_t> result = order;
      for (size_t d = result.size(); d < dims; ++d) result.push_back(static_cast<int64_t>(d));
      return result;
    };
    const auto saved = in_order(tensor.order, tensor.shape.size()), wanted = in_order(piece.order, tensor.shape.size());
    std::vector<int64_t> sizes, back(saved.size());
    for (size_t d = 0; d < saved.size(); ++d) {
      sizes.push_back(tensor.shape[saved[d]]);
      back[saved[d]] = static_cast<int64_t>(d);
    }
    const auto whole = at::cat(parts).view(sizes).permute(back);
    to.copy_(whole.permute(wanted).reshape({-1}).narrow(0, piece.begin, to.numel()));
  }

  at::Tensor part_of(const std::string& name, const ManifestPart& part) {
    const auto& file = file_of(part.rank);
    const auto* entry = file.find(name);
    TORCH_CHECK(entry && entry->numel() == part.length, "'", file.path(), "' does not hold what the manifest says of '", name, "'");
    const auto values = file.read(name);
    TORCH_CHECK(hash_of(values) == part.hash, "'", file.path(), "' is damaged: the ", entry->bytes(), " bytes of '", name, "' from byte ",
                entry->begin, " on do not have their hash");
    return values;
  }

  const SafetensorsFile& file_of(int rank) {
    auto& file = files_[static_cast<size_t>(rank)];
    if (file) return *file;
    const auto& facts = manifest_.files[static_cast<size_t>(rank)];
    const auto path = (fs::path(path_) / facts.name).string();
    file.emplace(path);
    TORCH_CHECK(static_cast<int64_t>(fs::file_size(path)) == facts.bytes && header_hash(path, *file) == facts.header_hash, "'", path,
                "' is not the file that this checkpoint was saved with: its header is damaged, or another save's");
    return *file;
  }

  std::string path_;
  Manifest manifest_;
  int rank_;
  bool same_world_ = true;
  std::vector<std::optional<SafetensorsFile>> files_;
};

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

bool is_floating(const std::string& dtype) {
  return dtype == "Float" || dtype == "Double" || dtype == "Half" || dtype == "BFloat16" || dtype.starts_with("Float8");
}

// What of a checkpoint goes where. Throws with everything that does not fit.
struct Fitting {
  std::vector<Piece> pieces;  // to be read, apart from the optimizer's
  std::map<std::string, SavedState> optimizer;
};

std::vector<std::string> states_of(const Manifest& manifest, const std::string& parameter) {
  const auto prefix = "optimizer/" + parameter + "/";
  std::vector<std::string> names;
  for (auto at = manifest.tensors.lower_bound(prefix); at != manifest.tensors.end() && at->first.starts_with(prefix); ++at)
    names.push_back(at->first.substr(prefix.size()));
  return names;
}

Fitting fit(const Contents& contents, const Manifest& manifest, const OptimizerAccess* optimizer, const LoadCheckpointOptions& options,
            const std::string& path) {
  const auto is_skipped = [&](std::string_view name) { return options.skip && options.skip(name); };
  Fitting fitting;
  std::vector<std::string> missing, unexpected, different;
  std::set<std::string> known;
  const auto add = [&](const Piece& piece) {
    known.insert(piece.name);
    const auto found = manifest.tensors.find(piece.name);
    if (found == manifest.tensors.end()) return missing.push_back(piece.name);
    const auto& saved = found->second;
    if (saved.shape != piece.shape)
      different.push_back(
          fmt::format("{} is {} in the checkpoint, {} in the model", piece.name, shape_text(saved.shape), shape_text(piece.shape)));
    else if (saved.dtype != dtype_text(piece.memory) && !(is_floating(saved.dtype) && piece.memory.is_floating_point()))
      different.push_back(fmt::format("{} is {} in the checkpoint, {} in the model", piece.name, saved.dtype, dtype_text(piece.memory)));
    else
      fitting.pieces.push_back(piece);
  };
  for (const auto& piece : contents.model())
    is_skipped(std::string_view(piece.name).substr(std::strlen("model/"))) ? void(known.insert(piece.name)) : void(add(piece));
  for (const auto& piece : contents.own()) add(piece);
  for (const auto& [name, step] : manifest.optimizer_steps) {
    const auto place = contents.places().find(name);
    if (is_skipped(name) || (place == contents.places().end() && !options.strict)) continue;
    if (place == contents.places().end()) {
      unexpected.push_back("optimizer/" + name);
      continue;
    }
    fitting.optimizer[name] = {step, states_of(manifest, name)};
  }
  for (const auto& [name, _] : manifest.tensors)
    if (!known.contains(name) && !name.starts_with("optimizer/") && !is_skipped(name.substr(name.find('/') + 1)))
      unexpected.push_back(name);
  if (optimizer) {
    TORCH_CHECK(!manifest.optimizer_type.empty() || !options.strict, "checkpoint '", path, "' holds no optimizer");
    if (!manifest.optimizer_type.empty()) {
      TORCH_CHECK(manifest.optimizer_type == optimizer->type(), "checkpoint '", path, "' holds the state of ", manifest.optimizer_type,
                  ", the optimizer given is ", optimizer->type());
      optimizer->check_options(manifest.optimizer_options);
    }
  }
  std::string problems;
  const auto list = [&](const char* title, const std::vector<std::string>& names) {
    if (!names.empty()) problems += fmt::format("\n  {}: {}", title, fmt::join(names, ", "));
  };
  if (options.strict) {
    list("not in the checkpoint", missing);
    list("not in the model", unexpected);
  }
  list("different", different);
  TORCH_CHECK(problems.empty(), "checkpoint '", path, "' does not fit the model:", problems);
  return fitting;
}

// The pieces of the optimizer's state before it has any: to check what will be read.
std::vector<Piece> expected_state(const Contents& contents, const Manifest& manifest, const Fitting& fitting) {
  std::vector<Piece> pieces;
  for (const auto& piece : contents.model()) {
    const auto parameter = piece.name.substr(std::strlen("model/"));
    const auto saved = fitting.optimizer.find(parameter);
    if (saved == fitting.optimizer.end()) continue;
    for (const auto& state : saved->second.slices) {
      auto expected = piece;
      expected.name = "optimizer/" + parameter + "/" + state;
      const auto& shape = manifest.tensors.at(expected.name).shape;
      TORCH_CHECK(shape == piece.shape, "'", expected.name, "' is ", shape_text(shape), " in the checkpoint, ", shape_text(piece.shape),
                  " in the model");
      pieces.push_back(std::move(expected));
    }
  }
  return pieces;
}

void seed_anew(uint64_t seed, int rank) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed +
                             0x9E3779B97F4A7C15ull * static_cast<uint64_t>(rank + 1));  // apart from each other and from the first run
}

// Rank 0 looks, and tells the others.
std::vector<std::string> candidates_at(const std::string& path, FlatViews& views) {
  std::string text;
  const auto refusal = comm::refusal_of([&] {
    if (views.rank() != 0) return;
    if (fs::exists(fs::path(path) / kManifestName)) {
      text = path;
      return;
    }
    for (const auto& each : list_checkpoints(path)) text += (text.empty() ? "" : "\n") + each;
  });
  const auto texts = comm::exchange_or_refuse(views.collectives(), "checkpoints to load", text, refusal, "look for checkpoints");
  const std::string all = texts.empty() ? text : texts.front();
  std::vector<std::string> paths;
  for (size_t at = 0; at < all.size();) {
    const size_t end = std::min(all.find('\n', at), all.size());
    paths.push_back(all.substr(at, end - at));
    at = end + 1;
  }
  return paths;
}

struct Prepared {
  std::optional<Source> source;
  Fitting fitting;
};

// Everything that can go wrong, before anything changes. Returns what a rank found wrong, the same on all ranks; "" where nothing.
std::string prepare(Prepared& prepared, Contents& contents, const std::string& path, const OptimizerAccess* optimizer,
                    const LoadCheckpointOptions& options) {
  const auto refusal = comm::refusal_of([&] {
    auto& source = prepared.source.emplace(path, contents.rank());
    source.set_world_size(contents.world_size());
    prepared.fitting = fit(contents, source.manifest(), optimizer, options, path);
    for (const auto& piece : prepared.fitting.pieces) source.read(piece, {});
    if (optimizer)
      for (const auto& piece : expected_state(contents, source.manifest(), prepared.fitting)) source.read(piece, {});
  });
  if (contents.world_size() == 1) return refusal;
  for (const auto& answer : contents.views().collectives().exchange("loading a checkpoint", refusal))
    if (!answer.empty()) return refusal.empty() ? "another rank cannot load the checkpoint: " + answer : refusal;
  return "";
}

void apply(Prepared& prepared, Contents& contents, OptimizerAccess* optimizer) {
  auto& source = *prepared.source;
  const auto& manifest = source.manifest();
  for (const auto& piece : prepared.fitting.pieces) {
    if (piece.name == kRandom) continue;
    source.read(piece, piece.memory.detach());
  }
  if (optimizer && !manifest.optimizer_type.empty()) {
    for (const auto& piece : contents.optimizer(optimizer->restore(contents.parameters(), prepared.fitting.optimizer)))
      source.read(piece, piece.memory);
    optimizer->set_options(manifest.optimizer_options);
  }
  if (!source.same_world()) return seed_anew(manifest.seed, contents.rank());
  auto state = at::empty_like(random_state());
  source.read(contents.own().back(), state);
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

}  // namespace

std::string save_checkpoint(const std::string& root, int64_t step, const FullyShardedBase& model, const CheckpointOptimizer& optimizer,
                            const std::string& extra, const SaveCheckpointOptions& options) {
  Contents contents(model);
  auto& collectives = contents.views().collectives();
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;

  std::vector<std::vector<Piece>> all;
  std::string nonce, temporary;
  auto refusal = comm::refusal_of([&] {
    TORCH_CHECK(step >= 0, "save_checkpoint: step must not be negative, got ", step);
    TORCH_CHECK(options.keep_last >= 0 && options.keep_every >= 0, "save_checkpoint: keep_last and keep_every must not be negative");
    contents.views().settle("save_checkpoint");
    all = {contents.model(), contents.own()};
    if (optimizer.access()) optimizer.access()->type();
    if (optimizer.access()) all.push_back(contents.optimizer(optimizer.access()->state(contents.parameters())));
    if (contents.rank() != 0) return;
    nonce = new_nonce();
    temporary = begin_checkpoint(root, nonce);
  });
  const auto give_up = [&] {
    std::error_code ignored;
    if (contents.rank() == 0 && !temporary.empty()) fs::remove_all(temporary, ignored);
  };
  // On an error the other ranks' too: nothing is left behind.
  const auto agreed = [&](const char* topic, const std::string& text) {
    try {
      return comm::exchange_or_refuse(collectives, topic, text, refusal, "save the checkpoint");
    } catch (...) {
      give_up();
      throw;
    }
  };
  const auto pieces = saved_here(all);
  const auto starts = agreed("saving a checkpoint", fmt::format("{} {} {}", step, bytes_of(pieces), temporary));
  int64_t bytes = bytes_of(pieces);
  if (!starts.empty()) {
    refusal = comm::refusal_of([&] {
      bytes = 0;
      for (size_t rank = 0; rank < starts.size(); ++rank) {
        std::istringstream words(starts[rank]);
        int64_t its_step = 0, its_bytes = 0;
        std::string its_folder;
        words >> its_step >> its_bytes >> std::ws;
        std::getline(words, its_folder);
        TORCH_CHECK(its_step == step, "save_checkpoint: rank ", rank, " saves step ", its_step, ", rank ", contents.rank(), " step ", step);
        bytes += its_bytes;
        if (rank == 0) temporary = its_folder;
      }
    });
  }
  nonce = temporary.substr(temporary.rfind('-') + 1);
  std::string report;
  if (refusal.empty())
    refusal = comm::refusal_of([&] {
      check_room((fs::path(temporary) / kManifestName).string(), bytes);
      report = to_text(write_rank_file(temporary, contents.rank(), pieces, nonce));
    });
  auto reports = agreed("a checkpoint's files", report);
  if (reports.empty()) reports.push_back(report);

  const auto path = checkpoint_path(root, step);
  refusal = comm::refusal_of([&] {
    if (contents.rank() != 0) return;
    Manifest manifest;
    manifest.step = step;
    manifest.world_size = contents.world_size();
    manifest.nonce = nonce;
    manifest.library_version = FSDP_VERSION;
    manifest.torch_version = TORCH_VERSION;
    manifest.seed = at::detail::getDefaultCPUGenerator().current_seed();
    manifest.extra = extra;
    if (const auto* access = optimizer.access()) {
      manifest.optimizer_type = access->type();
      manifest.optimizer_options = access->options();
      for (const auto& entry : access->state(contents.parameters())) manifest.optimizer_steps[entry.parameter] = entry.step;
    }
    std::vector<RankReport> parsed;
    for (const auto& each : reports) parsed.push_back(parse_report(each));
    put_together(manifest, all, parsed);
    const auto text = to_text(manifest);
    parse_manifest(text, "the manifest to be written");  // what is written can be read
    write_text_file((fs::path(temporary) / kManifestName).string(), text);
    publish_checkpoint(temporary, path);
    delete_old_checkpoints(root, options.keep_last, options.keep_every);
  });
  agreed("checkpoint saved", "");
  return path;
}

std::optional<LoadedCheckpoint> load_checkpoint(const std::string& path, FullyShardedBase& model, const CheckpointOptimizer& optimizer,
                                                const LoadCheckpointOptions& options) {
  Contents contents(model);
  auto& collectives = contents.views().collectives();
  c10::AutoGradMode no_grad(false);
  WithoutAccessHook no_hook;
  const auto refusal = comm::refusal_of([&] { contents.views().settle("load_checkpoint"); });
  comm::exchange_or_refuse(collectives, "load_checkpoint", "", refusal, "load a checkpoint");

  std::string problems;
  for (const auto& candidate : candidates_at(path, contents.views())) {
    Prepared prepared;
    const auto problem = prepare(prepared, contents, candidate, optimizer.access(), options);
    if (!problem.empty()) {
      problems += (problems.empty() ? "" : "\n") + problem;
      TORCH_CHECK(options.fall_back, problem);
      continue;
    }
    if (!problems.empty() && contents.rank() == 0) TORCH_WARN("libfsdp: loading '", candidate, "' instead: ", problems);
    const auto failure = comm::refusal_of([&] { apply(prepared, contents, optimizer.access()); });
    for (size_t group = 0; group < contents.views().groups().size(); ++group) {
      std::vector<size_t> every(contents.views().groups()[group].parameters.size());
      for (size_t p = 0; p < every.size(); ++p) every[p] = p;
      contents.views().were_written(group, every);
    }
    comm::exchange_or_refuse(collectives, "checkpoint loaded", "", failure.empty() ? "" : failure + ". The model is partly loaded",
                             "load the checkpoint");
    const auto& manifest = prepared.source->manifest();
    return LoadedCheckpoint{candidate, manifest.step, manifest.extra, manifest.world_size};
  }
  TORCH_CHECK(problems.empty(), "no checkpoint in '", path, "' can be loaded:\n", problems);
  return std::nullopt;
}

}  // namespace fsdp
