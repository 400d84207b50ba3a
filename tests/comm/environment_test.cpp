// What the environment may say wrongly, and that the error names the variable and its value.
#include "comm/environment.h"
#include "support/environment_scope.h"
#include "support/ranks.h"

#include <fsdp/process_group.h>

namespace {

using fsdp::comm::read_environment;
using fsdp::testing::EnvironmentScope;
using fsdp::testing::error_of;
using fsdp::testing::Variables;

// A launch that is right, with `changes`: {"RANK", ""} unsets; to be empty a variable is given as kEmpty.
constexpr const char* kEmpty = "<empty>";

Variables launch_with(const Variables& changes) {
  Variables all{{"RANK", "1"},
                {"WORLD_SIZE", "4"},
                {"LOCAL_RANK", "1"},
                {"MASTER_ADDR", "127.0.0.1"},
                {"MASTER_PORT", "29500"},
                {"TORCHELASTIC_USE_AGENT_STORE", ""},
                {"TORCHELASTIC_RESTART_COUNT", ""}};
  all.insert(all.end(), changes.begin(), changes.end());
  return all;
}

struct Case {
  const char* variable;
  const char* value;  // "" unsets
  std::vector<const char*> expected;
};

const std::vector<Case> kCases{
    {"RANK", "", {"RANK is missing", "torchrun"}},
    {"RANK", kEmpty, {"RANK is set but empty"}},
    {"RANK", "one", {"RANK='one' is not a whole number", "0 to 3", "WORLD_SIZE=4"}},
    {"RANK", "1x", {"RANK='1x' is not a whole number"}},
    {"RANK", "1.5", {"RANK='1.5' is not a whole number"}},
    {"RANK", " 1", {"RANK=' 1' is not a whole number"}},
    {"RANK", "-1", {"RANK=-1 is out of range", "0 to 3"}},
    {"RANK", "4", {"RANK=4 is out of range", "0 to 3", "WORLD_SIZE=4"}},
    {"RANK", "99999999999999999999", {"RANK=99999999999999999999 is out of range"}},
    {"WORLD_SIZE", "", {"WORLD_SIZE is missing"}},
    {"WORLD_SIZE", kEmpty, {"WORLD_SIZE is set but empty"}},
    {"WORLD_SIZE", "two", {"WORLD_SIZE='two' is not a whole number", "at least 1"}},
    {"WORLD_SIZE", "0", {"WORLD_SIZE=0 is out of range", "at least 1"}},
    {"WORLD_SIZE", "-2", {"WORLD_SIZE=-2 is out of range"}},
    {"LOCAL_RANK", kEmpty, {"LOCAL_RANK='' is not a whole number"}},
    {"LOCAL_RANK", "4", {"LOCAL_RANK=4 is out of range"}},
    {"MASTER_ADDR", "", {"MASTER_ADDR is missing"}},
    {"MASTER_ADDR", kEmpty, {"MASTER_ADDR is set but empty"}},
    {"MASTER_PORT", "", {"MASTER_PORT is missing"}},
    {"MASTER_PORT", kEmpty, {"MASTER_PORT is set but empty"}},
    {"MASTER_PORT", "http", {"MASTER_PORT='http' is not a whole number", "1 to 65535"}},
    {"MASTER_PORT", "0", {"MASTER_PORT=0 is out of range"}},
    {"MASTER_PORT", "-1", {"MASTER_PORT=-1 is out of range"}},
    {"MASTER_PORT", "65536", {"MASTER_PORT=65536 is out of range", "1 to 65535"}},
    {"TORCHELASTIC_USE_AGENT_STORE", "maybe", {"TORCHELASTIC_USE_AGENT_STORE='maybe'"}},
    {"TORCHELASTIC_RESTART_COUNT", "-1", {"TORCHELASTIC_RESTART_COUNT=-1 is out of range"}},
};

}  // namespace

TEST_CASE("a wrong variable is an error that names it and its value", "[comm][quick]") {
  for (const Case& wrong : kCases) {
    const EnvironmentScope scope(launch_with({{wrong.variable, wrong.value == kEmpty ? "" : wrong.value}}));
    if (wrong.value == kEmpty) setenv(wrong.variable, "", 1);
    INFO(wrong.variable << "=" << wrong.value);
    // By way of the public function: nothing may be opened, or waited for, before the variables are checked.
    const std::string error = error_of([] { fsdp::init_process_group(); });
    for (const char* expected : wrong.expected) CHECK_THAT(error, Catch::Matchers::ContainsSubstring(expected));
  }
}

TEST_CASE("an environment as torchrun makes it is read", "[comm][quick]") {
  const EnvironmentScope scope(launch_with({{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"TORCHELASTIC_RESTART_COUNT", "3"}}));
  const auto environment = read_environment();
  CHECK(environment.rank == 1);
  CHECK(environment.world_size == 4);
  CHECK(environment.master_addr == "127.0.0.1");
  CHECK(environment.master_port == 29500);
  CHECK(environment.agent_store);
  CHECK(environment.restart_count == 3);
}

TEST_CASE("one process needs no variables, and communicates nothing", "[comm][quick]") {
  Variables none = launch_with({});
  for (auto& [name, value] : none) value = "";
  const EnvironmentScope scope(none);
  auto group = fsdp::init_process_group();
  CHECK(group.rank() == 0);
  CHECK(group.world_size() == 1);
  CHECK(group.backend() == "single");
  group.barrier();
  auto copy = group;
  copy.close();
  CHECK_THAT(error_of([&] { group.barrier(); }),
             Catch::Matchers::ContainsSubstring("barrier failed") && Catch::Matchers::ContainsSubstring("the group has been closed"));
}

TEST_CASE("options that make no sense are refused by name", "[comm][quick]") {
  CHECK_THAT(error_of([] { fsdp::init_process_group({.backend = "mpi"}); }),
             Catch::Matchers::ContainsSubstring("'mpi'") && Catch::Matchers::ContainsSubstring("'auto' and 'gloo'"));
  CHECK_THAT(error_of([] { fsdp::init_process_group({.timeout = std::chrono::seconds(0)}); }),
             Catch::Matchers::ContainsSubstring("timeout must be positive"));
}

TEST_CASE("a MASTER_ADDR that does not exist is an error that names it", "[comm][quick]") {
  const EnvironmentScope scope(launch_with({{"MASTER_ADDR", "no-such-host.invalid"}}));
  CHECK_THAT(error_of([] { fsdp::init_process_group({.rendezvous_timeout = std::chrono::seconds(20)}); }),
             Catch::Matchers::ContainsSubstring("MASTER_ADDR='no-such-host.invalid'"));
}
