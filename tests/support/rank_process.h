// A process that runs rank bodies: this very executable, started again as a worker (see worker.h).
#pragma once

#include <chrono>
#include <deque>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <sys/types.h>

namespace fsdp::testing {

using Variables = std::vector<std::pair<std::string, std::string>>;  // an empty value unsets

// What travels between main process and worker: a word and a text.
struct Message {
  std::string kind;
  std::string text;
};

void write_message(int fd, const Message& message);          // throws when the other side is gone
std::optional<Message> take_message(std::string& received);  // the first whole message of what was received so far

class RankProcess {
 public:
  RankProcess(const std::string& mode, const Variables& environment);
  RankProcess(const RankProcess&) = delete;
  ~RankProcess();  // ends it: asks first, then kills after two seconds

  void send(const Message& message);
  void receive();  // reads what is there; at the end of the process (its pipe closes) collects its exit status
  std::optional<Message> next_message();

  bool ended() const { return ended_; }
  int wait_status() const { return status_; }  // as of waitpid(). REQUIRES: ended()
  std::string how_it_ended() const;            // "signal 9 (Killed)"
  std::chrono::steady_clock::time_point end_time() const { return end_time_; }

  void kill();          // SIGKILL; receive() will see the end
  void ask_to_leave();  // closes the command pipe: a worker ends itself then

  void mark_output();          // output() begins here from now on
  std::string output() const;  // stdout and stderr, at most the last 8 KB

  int results_fd() const { return results_; }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  int commands_ = -1;
  int results_ = -1;
  int output_ = -1;
  off_t output_mark_ = 0;
  std::string received_;
  bool ended_ = false;
  int status_ = 0;
  std::chrono::steady_clock::time_point end_time_;
};

// Waits until one of them has something to receive or `deadline` passes, and receives it.
void receive_from(const std::vector<RankProcess*>& processes, std::chrono::steady_clock::time_point deadline);

// A TCP port of the loopback interface that nobody else takes meanwhile: bound, without listening.
class ReservedPort {
 public:
  ReservedPort();
  ReservedPort(const ReservedPort&) = delete;
  ~ReservedPort();
  int port() const { return port_; }

 private:
  int fd_;
  int port_;
};

// What a launcher sets for rank `rank`, with OpenMP threads that do not spin.
Variables launch_variables(int rank, int world_size, int port);

}  // namespace fsdp::testing
