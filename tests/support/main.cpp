// One executable, two roles: the tests themselves, and the ranks that they start (see ranks.h).
#include "support/ranks.h"
#include "support/temp_folder.h"
#include "support/worker.h"

#include <catch2/catch_session.hpp>

#include <signal.h>

#include <string>

int main(int argc, char** argv) {
  using namespace fsdp::testing;
  if (argc == 3 && argv[1] == std::string(kWorkerFlag)) return worker_main(argv[2]);
  signal(SIGPIPE, SIG_IGN);  // a rank may end while it is being written to
  const int result = Catch::Session().run(argc, argv);
  end_pools();
  remove_run_folder();
  return result;
}
