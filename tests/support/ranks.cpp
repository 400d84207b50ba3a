#include "support/ranks.h"

#include "support/rank_process.h"
#include "support/worker.h"

#include <c10/util/Exception.h>

#include <sys/wait.h>

#include <map>
#include <memory>

namespace fsdp::testing {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::seconds;

constexpr seconds kStart{60};
constexpr seconds kToFollow{3};  // once one rank has failed, the others have so long to say how it looked to them

std::map<std::string, RankBody>& bodies() {
  static std::map<std::string, RankBody> all;
  return all;
}

std::string indented(const std::string& text) {
  std::string result = "    ";
  for (const char c : text) {
    result += c;
    if (c == '\n') result += "    ";
  }
  return result;
}

// The workers of one world size.
class Pool {
 public:
  explicit Pool(int world_size) {
    for (int rank = 0; rank < world_size; ++rank)
      workers_.push_back(std::make_unique<RankProcess>(kPoolMode, launch_variables(rank, world_size, port_.port())));
    complaints_.resize(workers_.size());
  }

  ~Pool() {
    for (auto& worker : workers_) worker->ask_to_leave();  // all of them, before the first is waited for
  }

  // What is left of a pool after a failure has nothing to say.
  void kill() {
    for (auto& worker : workers_) worker->kill();
  }

  // "" or what went wrong, rank by rank.
  std::string start() { return expect({"ready"}, Clock::now() + kStart) ? "" : story("did not start"); }

  std::string run(const std::string& name, seconds limit) {
    for (auto& worker : workers_) worker->mark_output();
    for (auto& worker : workers_) {
      try {
        worker->send({"run", name});
      } catch (const std::exception&) {  // it has ended, which expect() reports
      }
    }
    return expect({"passed"}, Clock::now() + limit) ? "" : story("failed or did not end within " + std::to_string(limit.count()) + " s");
  }

  // Whether the group can serve another test.
  bool in_step() { return expect({"in_step"}, Clock::now() + seconds(10)); }

 private:
  // True when every worker sends a message of this kind before the deadline.
  bool expect(const std::string& kind, Clock::time_point deadline) {
    std::vector<bool> done(workers_.size());
    std::vector<RankProcess*> waiting;
    bool good = true;
    for (auto& complaint : complaints_) complaint.clear();
    while (true) {
      waiting.clear();
      for (size_t rank = 0; rank < workers_.size(); ++rank) {
        RankProcess& worker = *workers_[rank];
        if (done[rank]) continue;
        if (const auto message = worker.next_message()) {
          done[rank] = true;
          if (message->kind == kind) continue;
          complaints_[rank] = message->text;
        } else if (worker.ended()) {
          done[rank] = true;
          complaints_[rank] = "ended by " + worker.how_it_ended();
        } else {
          waiting.push_back(&worker);
          continue;
        }
        if (good) deadline = std::min(deadline, Clock::now() + kToFollow);
        good = false;
      }
      if (waiting.empty()) return good;
      if (Clock::now() >= deadline) break;
      receive_from(waiting, deadline);
    }
    for (size_t rank = 0; rank < workers_.size(); ++rank)
      if (!done[rank]) complaints_[rank] = "still running, ended by the harness";
    return false;
  }

  std::string story(const std::string& what) const {
    std::string result = what;
    for (size_t rank = 0; rank < workers_.size(); ++rank) {
      if (!complaints_[rank].empty()) result += "\n  rank " + std::to_string(rank) + ": " + complaints_[rank];
      const std::string output = workers_[rank]->output();
      if (!output.empty()) result += "\n  output of rank " + std::to_string(rank) + ":\n" + indented(output);
    }
    return result;
  }

  const ReservedPort port_;
  std::vector<std::unique_ptr<RankProcess>> workers_;
  std::vector<std::string> complaints_;  // why a rank did not send what was expected
};

std::map<int, std::unique_ptr<Pool>>& pools() {
  static std::map<int, std::unique_ptr<Pool>> all;
  return all;
}

}  // namespace

RegisterRankBody::RegisterRankBody(const char* name, RankBody body) {
  if (!bodies().emplace(name, body).second) throw std::logic_error(std::string("two rank bodies are named '") + name + "'");
}

RankBody find_body(const std::string& name) {
  const auto place = bodies().find(name);
  if (place == bodies().end()) throw std::logic_error("no rank body is named '" + name + "'");
  return place->second;
}

std::string problem_on_pool(int world_size, const std::string& name, seconds limit) {
  std::unique_ptr<Pool>& pool = pools()[world_size];
  std::string problem;
  if (!pool) {
    pool = std::make_unique<Pool>(world_size);
    problem = pool->start();
  }
  if (problem.empty()) problem = pool->run(name, limit);
  if (!problem.empty()) pool->kill();
  if (!problem.empty() || !pool->in_step()) pool.reset();
  return problem;
}

void run_on_pool(int world_size, const std::string& name, seconds limit) {
  const std::string problem = problem_on_pool(world_size, name, limit);
  if (!problem.empty()) FAIL("'" << name << "' on " << world_size << " ranks: " << problem);
  SUCCEED();
}

void end_pools() { pools().clear(); }

std::vector<RankResult> run_in_own_processes(int world_size, const std::string& name, seconds limit,
                                             const std::vector<std::pair<std::string, std::string>>& environment) {
  const auto started = Clock::now(), deadline = started + limit;
  const ReservedPort port;
  std::vector<std::unique_ptr<RankProcess>> processes;
  std::vector<RankProcess*> running;
  for (int rank = 0; rank < world_size; ++rank) {
    Variables variables = launch_variables(rank, world_size, port.port());
    variables.insert(variables.end(), environment.begin(), environment.end());
    processes.push_back(std::make_unique<RankProcess>(kOwnMode, variables));
    processes.back()->send({"run", name});
  }
  while (true) {
    running.clear();
    for (auto& process : processes)
      if (!process->ended()) running.push_back(process.get());
    if (running.empty() || Clock::now() >= deadline) break;
    receive_from(running, deadline);
  }
  for (RankProcess* process : running) process->kill();
  for (RankProcess* process : running)
    while (!process->ended()) process->receive();

  std::vector<RankResult> results;
  for (int rank = 0; rank < world_size; ++rank) {
    RankProcess& process = *processes[rank];
    const int status = process.wait_status();
    RankResult result;
    result.rank = rank;
    result.exited = WIFEXITED(status);
    result.exit_code = result.exited ? WEXITSTATUS(status) : 0;
    result.signal = result.exited ? 0 : WTERMSIG(status);
    result.killed_by_limit = std::find(running.begin(), running.end(), &process) != running.end();
    while (const auto message = process.next_message()) result.message = message->text;
    result.output = process.output();
    result.seconds = std::chrono::duration<double>(process.end_time() - started).count();
    results.push_back(std::move(result));
  }
  return results;
}

std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  throw std::runtime_error("expected an exception, but none was thrown");
}

}  // namespace fsdp::testing
