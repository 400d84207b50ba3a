// What launchers may say, rightly and wrongly; an error names the variable and its value, at once.
#include "comm/environment.h"
#include "support/environment_scope.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

#include <chrono>

namespace {

using namespace std::chrono_literals;
using Catch::Matchers::ContainsSubstring;
using fsdp::ProcessGroupOptions;
using fsdp::comm::first_host;
using fsdp::comm::read_environment;
using fsdp::testing::EnvironmentScope;
using fsdp::testing::error_of;
using fsdp::testing::Variables;

constexpr const char* kEmpty = "<empty>";  // a variable that is set to nothing; "" unsets it

// Exactly these variables, of all that are read.
class Launch {
 public:
  explicit Launch(const Variables& variables) : none_(unset()), scope_(variables) {
    for (const auto& [name, value] : variables)
      if (value == kEmpty) setenv(name.c_str(), "", 1);
  }

 private:
  static Variables unset() {
    Variables all;
    for (const char* name : {"RANK",
                             "WORLD_SIZE",
                             "LOCAL_RANK",
                             "MASTER_ADDR",
                             "MASTER_PORT",
                             "TORCHELASTIC_USE_AGENT_STORE",
                             "TORCHELASTIC_RESTART_COUNT",
                             "TORCHELASTIC_RUN_ID",
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             "PMIX_NAMESPACE",
                             "SLURM_PROCID",
                             "SLURM_NTASKS",
                             "SLURM_STEP_NUM_TASKS",
                             "SLURM_LOCALID",
                             "SLURM_STEP_ID",
                             "SLURM_STEP_NODELIST",
                             "SLURM_NODELIST",
                             "SLURM_JOB_ID"})
      all.emplace_back(name, "");
    return all;
  }

  const EnvironmentScope none_, scope_;
};

Variables with(Variables variables, const Variables& changes) {
  variables.insert(variables.end(), changes.begin(), changes.end());
  return variables;
}

Variables torchrun(const Variables& changes = {}) {
  return with({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}, changes);
}

Variables mpirun(const Variables& changes = {}) {
  return with({{"OMPI_COMM_WORLD_RANK", "1"},
               {"OMPI_COMM_WORLD_SIZE", "4"},
               {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
               {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
               {"PMIX_NAMESPACE", "2718433281"}},
              changes);
}

Variables srun(const Variables& changes = {}) {
  return with({{"SLURM_PROCID", "1"},
               {"SLURM_NTASKS", "4"},
               {"SLURM_LOCALID", "0"},
               {"SLURM_JOB_ID", "4711"},
               {"SLURM_STEP_ID", "0"},
               {"SLURM_STEP_NODELIST", "n[007-009]"},
               {"SLURM_NODELIST", "n[006-009]"}},
              changes);
}

ProcessGroupOptions placed(std::optional<int> rank, std::optional<int> world_size, std::optional<std::string> address,
                           std::optional<int> port) {
  return {.rank = rank, .world_size = world_size, .master_addr = std::move(address), .master_port = port};
}

struct Case {
  Variables variables;
  std::vector<const char*> expected;
  ProcessGroupOptions options = {};
};

const std::vector<Case> kCases{
    {torchrun({{"RANK", ""}}), {"RANK is missing", "torchrun"}},
    {torchrun({{"RANK", kEmpty}}), {"RANK is set but empty"}},
    {torchrun({{"RANK", "one"}}), {"RANK='one' is not a whole number", "0 to 3", "WORLD_SIZE=4"}},
    {torchrun({{"RANK", "1x"}}), {"RANK='1x' is not a whole number"}},
    {torchrun({{"RANK", "1.5"}}), {"RANK='1.5' is not a whole number"}},
    {torchrun({{"RANK", " 1"}}), {"RANK=' 1' is not a whole number"}},
    {torchrun({{"RANK", "-1"}}), {"RANK=-1 is out of range", "0 to 3"}},
    {torchrun({{"RANK", "4"}}), {"RANK=4 is out of range", "0 to 3", "WORLD_SIZE=4"}},
    {torchrun({{"RANK", "99999999999999999999"}}), {"RANK=99999999999999999999 is out of range"}},
    {torchrun({{"WORLD_SIZE", ""}}), {"WORLD_SIZE is missing"}},
    {torchrun({{"WORLD_SIZE", kEmpty}}), {"WORLD_SIZE is set but empty"}},
    {torchrun({{"WORLD_SIZE", "two"}}), {"WORLD_SIZE='two' is not a whole number", "at least 1"}},
    {torchrun({{"WORLD_SIZE", "0"}}), {"WORLD_SIZE=0 is out of range", "at least 1"}},
    {torchrun({{"WORLD_SIZE", "-2"}}), {"WORLD_SIZE=-2 is out of range"}},
    {torchrun({{"LOCAL_RANK", kEmpty}}), {"LOCAL_RANK='' is not a whole number"}},
    {torchrun({{"LOCAL_RANK", "4"}}), {"LOCAL_RANK=4 is out of range"}},
    {torchrun({{"MASTER_ADDR", ""}}), {"MASTER_ADDR is missing"}},
    {torchrun({{"MASTER_ADDR", kEmpty}}), {"MASTER_ADDR is set but empty"}},
    {torchrun({{"MASTER_PORT", ""}}), {"MASTER_PORT is missing"}},
    {torchrun({{"MASTER_PORT", kEmpty}}), {"MASTER_PORT is set but empty"}},
    {torchrun({{"MASTER_PORT", "http"}}), {"MASTER_PORT='http' is not a whole number", "1 to 65535"}},
    {torchrun({{"MASTER_PORT", "0"}}), {"MASTER_PORT=0 is out of range"}},
    {torchrun({{"MASTER_PORT", "-1"}}), {"MASTER_PORT=-1 is out of range"}},
    {torchrun({{"MASTER_PORT", "65536"}}), {"MASTER_PORT=65536 is out of range", "1 to 65535"}},
    {torchrun({{"MASTER_PORT", "70000"}}), {"MASTER_PORT=70000 is out of range", "1 to 65535"}},
    {torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "maybe"}}), {"TORCHELASTIC_USE_AGENT_STORE='maybe'"}},
    {torchrun({{"TORCHELASTIC_RESTART_COUNT", "-1"}}), {"TORCHELASTIC_RESTART_COUNT=-1 is out of range"}},
    {{{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "29500"}}, {"RANK is missing"}},

    // Addresses that nobody has, or not this host: found by rank 0, which is to listen there.
    {torchrun({{"MASTER_ADDR", "no such host"}}),
     {"host 'no such host' cannot be resolved", "MASTER_ADDR=no such host", "MASTER_PORT=29500"}},
    {torchrun({{"MASTER_ADDR", "300.1.1.1"}, {"RANK", "0"}}), {"cannot be resolved", "MASTER_ADDR=300.1.1.1"}},
    {torchrun({{"MASTER_ADDR", "192.0.2.1"}, {"RANK", "0"}}), {"rank 0 cannot listen at 192.0.2.1", "MASTER_ADDR=192.0.2.1"}},

    {mpirun({{"OMPI_COMM_WORLD_SIZE", ""}}), {"OMPI_COMM_WORLD_SIZE is missing", "mpirun"}},
    {mpirun({{"OMPI_COMM_WORLD_RANK", ""}}), {"OMPI_COMM_WORLD_RANK is missing"}},
    {mpirun({{"OMPI_COMM_WORLD_RANK", "4"}}), {"OMPI_COMM_WORLD_RANK=4 is out of range", "0 to 3", "OMPI_COMM_WORLD_SIZE=4"}},
    {mpirun({{"OMPI_COMM_WORLD_LOCAL_RANK", "-1"}}), {"OMPI_COMM_WORLD_LOCAL_RANK=-1 is out of range"}},
    {mpirun({{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}), {"MASTER_ADDR is missing"}},
    {mpirun({{"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}, {"MASTER_ADDR", "n1"}, {"PMIX_NAMESPACE", ""}}), {"MASTER_PORT is missing"}},
    {mpirun({{"MASTER_PORT", "0"}}), {"MASTER_PORT=0 is out of range"}},

    {srun({{"SLURM_PROCID", "x"}}), {"SLURM_PROCID='x' is not a whole number", "SLURM_NTASKS=4"}},
    {srun({{"SLURM_PROCID", ""}}), {"SLURM_PROCID is missing", "srun"}},
    {srun({{"SLURM_PROCID", "4"}}), {"SLURM_PROCID=4 is out of range"}},
    {srun({{"SLURM_STEP_NUM_TASKS", "0"}}), {"SLURM_STEP_NUM_TASKS=0 is out of range"}},
    {srun({{"SLURM_LOCALID", "9"}}), {"SLURM_LOCALID=9 is out of range"}},
    {srun({{"SLURM_STEP_NODELIST", "n[007-"}}), {"SLURM_STEP_NODELIST='n[007-' is not a list of hosts"}},
    {srun({{"SLURM_STEP_NODELIST", ""}, {"SLURM_NODELIST", kEmpty}}), {"SLURM_NODELIST is set but empty"}},
    {srun({{"SLURM_STEP_NODELIST", ""}, {"SLURM_NODELIST", ""}}), {"SLURM_NODELIST is missing"}},
    {srun({{"SLURM_JOB_ID", ""}}), {"SLURM_JOB_ID is missing"}},
    {srun({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NODELIST", "192.0.2.[1-3]"}}),
     {"rank 0 cannot listen at 192.0.2.1", "the first host of SLURM_STEP_NODELIST=192.0.2.[1-3]", "from SLURM_JOB_ID=4711"}},

    {torchrun(mpirun({{"RANK", "2"}, {"WORLD_SIZE", "4"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}})),
     {"RANK=2 and WORLD_SIZE=4 contradict OMPI_COMM_WORLD_RANK=1 and OMPI_COMM_WORLD_SIZE=4"}},
    {torchrun(srun({{"SLURM_NTASKS", "8"}})), {"RANK=1 and WORLD_SIZE=4 contradict SLURM_PROCID=1 and SLURM_NTASKS=8"}},
    {torchrun(mpirun({{"OMPI_COMM_WORLD_SIZE", "four"}})), {"OMPI_COMM_WORLD_SIZE='four' is not a whole number"}},

    {{}, {"gives rank but not world_size, master_addr, master_port"}, {.rank = 0}},
    {torchrun(), {"gives rank, world_size, master_addr but not master_port"}, placed(0, 2, "127.0.0.1", {})},
    {{}, {"ProcessGroupOptions::rank is 2, out of range", "0 to 1", "world_size is 2"}, placed(2, 2, "127.0.0.1", 29500)},
    {{}, {"ProcessGroupOptions::rank is -1, out of range"}, placed(-1, 2, "127.0.0.1", 29500)},
    {{}, {"ProcessGroupOptions::world_size is 0, out of range"}, placed(0, 0, "127.0.0.1", 29500)},
    {{}, {"ProcessGroupOptions::master_port is 70000, out of range"}, placed(0, 2, "127.0.0.1", 70000)},
    {{}, {"ProcessGroupOptions::master_port is 0, out of range"}, placed(0, 2, "127.0.0.1", 0)},
    {{}, {"ProcessGroupOptions::master_addr is given but empty"}, placed(0, 2, "", 29500)},
    {torchrun(), {"rank 0 of 2", "cannot listen at 192.0.2.1", "master_addr=192.0.2.1"}, placed(0, 2, "192.0.2.1", 29500)},
};

}  // namespace

// By way of the public function: nothing may be opened, or waited for, before all that is said has been checked.
TEST_CASE("a wrong setting is an error within half a second that names it and its value", "[comm][quick]") {
  for (const Case& wrong : kCases) {
    const Launch launch(wrong.variables);
    CAPTURE(wrong.expected);
    std::string error;
    const auto started = std::chrono::steady_clock::now();
    try {
      fsdp::init_process_group(wrong.options);
    } catch (const c10::Error& caught) {
      error = caught.what_without_backtrace();
    }
    CHECK(std::chrono::steady_clock::now() - started < 500ms);
    for (const char* expected : wrong.expected) CHECK_THAT(error, ContainsSubstring(expected));
  }
}

TEST_CASE("an environment as torchrun makes it is read", "[comm][quick]") {
  const Launch launch(torchrun({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  const auto environment = read_environment();
  CHECK(environment.rank == 1);
  CHECK(environment.world_size == 4);
  CHECK(environment.local_rank == 1);
  CHECK(environment.master_addr == "127.0.0.1");
  CHECK(environment.master_port == 29500);
  CHECK(environment.place == "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500");
  CHECK(environment.agent_store);
  CHECK(environment.restart_count == 3);
}

TEST_CASE("mpirun on one host needs no variables; MASTER_ADDR and MASTER_PORT count where they are set", "[comm][quick]") {
  const auto port_of = [](const Variables& variables) {
    const Launch launch(variables);
    const auto environment = read_environment();
    CHECK(environment.rank == 1);
    CHECK(environment.world_size == 4);
    CHECK(environment.local_rank == 1);
    CHECK(environment.master_addr == "127.0.0.1");
    return environment.master_port;
  };
  const auto port = port_of(mpirun());
  CHECK(port >= 10'000);
  CHECK(port < 30'000);
  CHECK(port_of(mpirun()) == port);
  CHECK(port_of(mpirun({{"PMIX_NAMESPACE", "2718433282"}})) != port);
  CHECK(port_of(mpirun({{"MASTER_PORT", "1234"}})) == 1234);
  // The shells that mpirun's helpers run in may be tasks of Slurm.
  CHECK(port_of(mpirun(srun())) == port);
  const Launch launch(mpirun({{"MASTER_ADDR", "n1"}, {"MASTER_PORT", "1234"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}}));
  CHECK(read_environment().master_addr == "n1");
}

TEST_CASE("a task of srun is read, a shell of sbatch or salloc is one process", "[comm][quick]") {
  {
    const Launch launch(srun());
    const auto environment = read_environment();
    CHECK(environment.rank == 1);
    CHECK(environment.world_size == 4);
    CHECK(environment.local_rank == 0);
    CHECK(environment.master_addr == "n007");
    CHECK(environment.master_port >= 10'000);
    CHECK(environment.master_port < 30'000);
    const Launch other(srun({{"SLURM_JOB_ID", "4712"}}));
    CHECK(read_environment().master_port != environment.master_port);
  }
  {
    const Launch launch(srun({{"SLURM_STEP_NODELIST", ""}, {"MASTER_PORT", "1234"}}));
    CHECK(read_environment().master_addr == "n006");
    CHECK(read_environment().master_port == 1234);
  }
  {
    const Launch launch(srun({{"MASTER_ADDR", "n9"}}));
    CHECK(read_environment().master_addr == "n9");
  }
  const Variables no_step{{"SLURM_STEP_ID", ""}, {"SLURM_STEP_NODELIST", ""}, {"SLURM_PROCID", "0"}};
  for (const Variables& shell : {srun(no_step), srun(with(no_step, {{"SLURM_PROCID", ""}, {"SLURM_LOCALID", ""}})),
                                 srun({{"SLURM_PROCID", "0"}, {"SLURM_STEP_NUM_TASKS", "1"}})}) {
    const Launch launch(shell);
    CHECK(read_environment().world_size == 1);
  }
}

TEST_CASE("launchers inside launchers: torchrun's names count, and need agree only where it did not set them", "[comm][quick]") {
  const auto rank_of = [](const Variables& variables) {
    const Launch launch(variables);
    return read_environment().rank;
  };
  CHECK(rank_of(torchrun(srun())) == 1);                                                       // equal
  CHECK(rank_of(torchrun(srun({{"SLURM_PROCID", "0"}, {"TORCHELASTIC_RUN_ID", "x"}}))) == 1);  // a torchrun a host, by srun
  CHECK(rank_of(torchrun(mpirun({{"OMPI_COMM_WORLD_RANK", "0"}, {"TORCHELASTIC_RUN_ID", "x"}}))) == 1);
  CHECK(rank_of(torchrun(srun({{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}}))) == 1);  // by hand, in a shell that srun started
}

TEST_CASE("what the program gives counts more than the environment, which is not even read", "[comm][quick]") {
  const Launch launch(torchrun({{"RANK", "nonsense"}, {"TORCHELASTIC_RESTART_COUNT", "7"}}));
  const auto environment = read_environment(placed(2, 3, "n5", 1234));
  CHECK(environment.rank == 2);
  CHECK(environment.world_size == 3);
  CHECK(environment.master_addr == "n5");
  CHECK(environment.master_port == 1234);
  CHECK(environment.restart_count == 0);
}

TEST_CASE("the first host of a list of Slurm's", "[comm][quick]") {
  CHECK(first_host("n1") == "n1");
  CHECK(first_host("n1,n2") == "n1");
  CHECK(first_host("n[001-003,7]-ib,m1") == "n001-ib");
  CHECK(first_host("n[7,001-003]") == "n7");
  CHECK(first_host("rack[2-3]node[05]") == "rack2node05");
  for (const char* wrong : {"", ",n1", "n[", "n]", "n[]", "n[a-b]", "n[1-2", "n[[1]]", "n[1 ]", "n 1", "n[-1]"}) {
    INFO(wrong);
    CHECK(first_host(wrong) == "");
  }
}

TEST_CASE("one process needs no variables, and communicates nothing", "[comm][quick]") {
  const Launch launch({});
  auto group = fsdp::init_process_group();
  CHECK(group.rank() == 0);
  CHECK(group.world_size() == 1);
  CHECK(group.backend() == "single");
  group.barrier();
  auto copy = group;
  copy.close();
  CHECK_THAT(error_of([&] { group.barrier(); }), ContainsSubstring("barrier failed") && ContainsSubstring("the group has been closed"));
}

TEST_CASE("options that make no sense are refused by name", "[comm][quick]") {
  CHECK_THAT(error_of([] { fsdp::init_process_group({.backend = "mpi"}); }),
             ContainsSubstring("'mpi'") && ContainsSubstring("'auto', 'gloo' and 'nccl'"));
  CHECK_THAT(error_of([] { fsdp::init_process_group({.timeout = 0s}); }), ContainsSubstring("timeout must be positive"));
}

RANK_BODY("joins by what the program gives") {
  const int rank = std::atoi(std::getenv("RANK")), port = std::atoi(std::getenv("MASTER_PORT"));
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"}) unsetenv(name);
  ProcessGroupOptions options = placed(1 - rank, 2, "localhost", port);
  options.rendezvous_timeout = 20s;
  auto joined = fsdp::init_process_group(options);
  EXPECT(joined.rank() == 1 - rank && joined.world_size() == 2, "rank " << joined.rank() << " of " << joined.world_size());
  joined.barrier();
}

// What each launcher would set, instead of what the tests set.
RANK_BODY("joins as a task of srun or mpirun") {
  const std::string rank = std::getenv("RANK"), port = std::getenv("MASTER_PORT"), launcher = std::getenv("LAUNCHER");
  const Launch launch(
      launcher == "srun"
          ? srun({{"SLURM_PROCID", rank}, {"SLURM_NTASKS", "2"}, {"SLURM_STEP_NODELIST", "localhost"}, {"MASTER_PORT", port}})
          : mpirun({{"OMPI_COMM_WORLD_RANK", rank},
                    {"OMPI_COMM_WORLD_SIZE", "2"},
                    {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                    {"MASTER_PORT", port}}));
  auto joined = fsdp::init_process_group({.rendezvous_timeout = 20s});
  EXPECT(std::to_string(joined.rank()) == rank && joined.world_size() == 2, "rank " << joined.rank() << " of " << joined.world_size());
  joined.barrier();
}

TEST_CASE("processes meet by the options, by srun's variables and by mpirun's", "[comm]") {
  const auto check = [](const char* body, const Variables& variables) {
    for (const auto& result : fsdp::testing::run_in_own_processes(2, body, 60s, with({{fsdp::testing::kWithoutGroup, "1"}}, variables))) {
      INFO(body << ": " << result.message << "\n" << result.output);
      CHECK(result.exited);
      CHECK(result.exit_code == 0);
    }
  };
  check("joins by what the program gives", {});
  check("joins as a task of srun or mpirun", {{"LAUNCHER", "srun"}});
  check("joins as a task of srun or mpirun", {{"LAUNCHER", "mpirun"}});
}
