#include "comm/environment.h"

#include <c10/util/Exception.h>

#include <charconv>
#include <cstdlib>
#include <limits>

namespace fsdp::comm {

namespace {

constexpr int kMost = std::numeric_limits<int>::max();
constexpr const char* kRemedy =
    "; start the program with torchrun, scripts/launch, mpirun or srun, which set all that belongs together, or set none of RANK, "
    "WORLD_SIZE, MASTER_ADDR and MASTER_PORT to run a single process";

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? std::optional<std::string>(value) : std::nullopt;
}

bool is_set(const char* name) { return std::getenv(name) != nullptr; }

std::string required(const char* name) {
  const auto value = variable(name);
  TORCH_CHECK(value, "environment variable ", name, " is missing", kRemedy);
  TORCH_CHECK(!value->empty(), "environment variable ", name, " is set but empty", kRemedy);
  return *value;
}

int number(const char* name, const std::string& text, int least, int largest, const std::string& range) {
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  TORCH_CHECK(error != std::errc::invalid_argument && end == text.data() + text.size(), "environment variable ", name, "='", text,
              "' is not a whole number (expected ", range, ")");
  TORCH_CHECK(error == std::errc() && value >= least && value <= largest, "environment variable ", name, "=", text,
              " is out of range: expected ", range);
  return value;
}

bool flag(const char* name) {
  const std::string text = variable(name).value_or("");
  if (text.empty() || text == "False" || text == "false" || text == "0") return false;
  TORCH_CHECK(text == "True" || text == "true" || text == "1", "environment variable ", name, "='", text, "' is neither True nor False");
  return true;
}

// How one launcher names a process's place.
struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;

  bool any() const { return is_set(rank) || is_set(world_size); }
};

constexpr Names kTorchrun{"RANK", "WORLD_SIZE", "LOCAL_RANK"};
constexpr Names kOpenMpi{"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"};

// Only srun sets SLURM_STEP_*. The shells of sbatch and salloc have SLURM_NTASKS, and that of sbatch SLURM_PROCID=0 as well, without
// being one of several tasks. A shell that is a step by itself has SLURM_STEP_NUM_TASKS=1 beside the job's SLURM_NTASKS.
bool in_slurm_step() { return is_set("SLURM_STEP_ID") || is_set("SLURM_STEP_NODELIST"); }
Names slurm() { return {"SLURM_PROCID", is_set("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", "SLURM_LOCALID"}; }

// The world size comes first, since the range of a rank depends on it; a missing variable is reported before a wrong one.
Environment read_ranks(const Names& names) {
  required(names.rank);
  Environment result;
  result.world_size = number(names.world_size, required(names.world_size), 1, kMost, "at least 1");
  const std::string ranks = c10::str("0 to ", result.world_size - 1, ", since ", names.world_size, "=", result.world_size);
  result.rank = number(names.rank, required(names.rank), 0, result.world_size - 1, ranks);
  if (const auto local_rank = variable(names.local_rank))
    result.local_rank = number(names.local_rank, *local_rank, 0, result.world_size - 1, ranks);
  return result;
}

// A launcher of a single task may well have started a shell in which another launcher runs: it contradicts nobody.
void check_agreement(const Names& names, const Environment& chosen, const Names& others) {
  if (!others.any()) return;
  const Environment other = read_ranks(others);
  TORCH_CHECK(other.world_size == 1 || (other.rank == chosen.rank && other.world_size == chosen.world_size), names.rank, "=", chosen.rank,
              " and ", names.world_size, "=", chosen.world_size, " contradict ", others.rank, "=", other.rank, " and ", others.world_size,
              "=", other.world_size, ": unset those that are not meant, or give rank and world_size in ProcessGroupOptions");
}

// Below the range from which systems take ports for outgoing connections.
uint16_t port_from(const std::string& text) {
  uint32_t hash = 2166136261u;  // FNV-1a: the same in every build
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return static_cast<uint16_t>(10'000 + hash % 20'000);
}

void set_address(Environment& result, const std::string& address, const std::string& source) {
  result.master_addr = address;
  result.place = source;
}

void set_port(Environment& result, uint16_t port, const std::string& source) {
  result.master_port = port;
  result.place += " " + source;
}

void read_master_addr(Environment& result) {
  const std::string address = required("MASTER_ADDR");
  set_address(result, address, "MASTER_ADDR=" + address);
}

void read_master_port(Environment& result) {
  const int port = number("MASTER_PORT", required("MASTER_PORT"), 1, 65535, "1 to 65535");
  set_port(result, static_cast<uint16_t>(port), c10::str("MASTER_PORT=", port));
}

// One host needs no variables: mpirun's name for the job gives the port.
void read_open_mpi_place(Environment& result) {
  const bool one_host = variable("OMPI_COMM_WORLD_LOCAL_SIZE") == variable("OMPI_COMM_WORLD_SIZE");
  if (is_set("MASTER_ADDR") || !one_host) {
    read_master_addr(result);
  } else {
    set_address(result, "127.0.0.1", "127.0.0.1, since OMPI_COMM_WORLD_LOCAL_SIZE is OMPI_COMM_WORLD_SIZE;");
  }
  const auto job = variable("PMIX_NAMESPACE");
  if (is_set("MASTER_PORT") || !job) return read_master_port(result);
  const uint16_t port = port_from(*job);
  set_port(result, port, c10::str("port ", port, ", from PMIX_NAMESPACE=", *job));
}

void read_slurm_place(Environment& result) {
  if (is_set("MASTER_ADDR")) {
    read_master_addr(result);
  } else {
    const char* name = is_set("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_NODELIST";
    const std::string list = required(name), host = first_host(list);
    TORCH_CHECK(!host.empty(), "environment variable ", name, "='", list, "' is not a list of hosts as Slurm writes it: n[1-3,7],m1");
    set_address(result, host, c10::str(host, ", the first host of ", name, "=", list, ";"));
  }
  if (is_set("MASTER_PORT")) return read_master_port(result);
  const std::string job = required("SLURM_JOB_ID"), step = variable("SLURM_STEP_ID").value_or("");
  const uint16_t port = port_from(job + "." + step);
  set_port(result, port, c10::str("port ", port, ", from SLURM_JOB_ID=", job, step.empty() ? "" : " SLURM_STEP_ID=" + step));
}

Environment from_torchrun() {
  for (const char* name : {kTorchrun.rank, kTorchrun.world_size, "MASTER_ADDR", "MASTER_PORT"}) required(name);
  Environment result = read_ranks(kTorchrun);
  // Under torchrun itself, mpirun or srun may have started one torchrun a host: their ranks are others.
  if (!is_set("TORCHELASTIC_RUN_ID")) {
    check_agreement(kTorchrun, result, kOpenMpi);
    if (in_slurm_step() && !kOpenMpi.any()) check_agreement(kTorchrun, result, slurm());
  }
  read_master_addr(result);
  read_master_port(result);
  result.agent_store = flag("TORCHELASTIC_USE_AGENT_STORE");
  if (const auto restarts = variable("TORCHELASTIC_RESTART_COUNT"))
    result.restart_count = number("TORCHELASTIC_RESTART_COUNT", *restarts, 0, kMost, "at least 0");
  return result;
}

std::optional<Environment> from_options(const ProcessGroupOptions& options) {
  std::string given, missing;
  const auto note = [&](const auto& value, const char* name) {
    std::string& list = value ? given : missing;
    list += (list.empty() ? "" : ", ") + std::string(name);
  };
  note(options.rank, "rank");
  note(options.world_size, "world_size");
  note(options.master_addr, "master_addr");
  note(options.master_port, "master_port");
  if (given.empty()) return std::nullopt;
  TORCH_CHECK(missing.empty(), "ProcessGroupOptions gives ", given, " but not ", missing,
              ": give all four, or none to have the environment read");
  const auto check = [](const char* name, int value, int least, int largest, const std::string& range) {
    TORCH_CHECK(value >= least && value <= largest, "ProcessGroupOptions::", name, " is ", value, ", out of range: expected ", range);
  };
  const int world_size = *options.world_size;
  check("world_size", world_size, 1, kMost, "at least 1");
  check("rank", *options.rank, 0, world_size - 1, c10::str("0 to ", world_size - 1, ", since world_size is ", world_size));
  check("master_port", *options.master_port, 1, 65535, "1 to 65535");
  TORCH_CHECK(!options.master_addr->empty(), "ProcessGroupOptions::master_addr is given but empty");
  Environment result;
  result.rank = *options.rank;
  result.world_size = world_size;
  set_address(result, *options.master_addr, "ProcessGroupOptions master_addr=" + *options.master_addr);
  set_port(result, static_cast<uint16_t>(*options.master_port), c10::str("master_port=", *options.master_port));
  return result;
}

}  // namespace

std::string first_host(const std::string& nodelist) {
  std::string host;
  for (size_t i = 0; i < nodelist.size() && nodelist[i] != ','; ++i) {
    const char c = nodelist[i];
    if (c == ']' || static_cast<unsigned char>(c) <= ' ') return "";
    if (c != '[') {
      host += c;
      continue;
    }
    const size_t close = nodelist.find(']', i);
    if (close == std::string::npos) return "";
    const size_t end = nodelist.find_first_not_of("0123456789", i + 1);
    if (end == i + 1 || (end != close && nodelist[end] != '-' && nodelist[end] != ',')) return "";
    host += nodelist.substr(i + 1, end - i - 1);
    i = close;
  }
  return host;
}

Environment read_environment(const ProcessGroupOptions& options) {
  if (auto given = from_options(options)) return *given;
  if (kTorchrun.any()) return from_torchrun();
  Environment result;
  if (kOpenMpi.any()) {
    // mpirun may have started its own helpers with srun: then Slurm's variables are theirs.
    result = read_ranks(kOpenMpi);
    if (result.world_size > 1) read_open_mpi_place(result);
  } else if (in_slurm_step() && slurm().any()) {
    result = read_ranks(slurm());
    if (result.world_size > 1) read_slurm_place(result);
  } else if (is_set("MASTER_ADDR") || is_set("MASTER_PORT")) {
    return from_torchrun();  // which says what is missing
  }
  return result;
}

}  // namespace fsdp::comm
