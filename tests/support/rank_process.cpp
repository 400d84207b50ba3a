#include "support/rank_process.h"

#include "support/worker.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <stdexcept>
#include <thread>

extern char** environ;

namespace fsdp::testing {

namespace {

void check(bool good, const char* what) {
  if (!good) throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

std::vector<std::string> with_variables(const Variables& changes) {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; *entry; ++entry) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos) variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  for (const auto& [name, value] : changes) {
    if (value.empty())
      variables.erase(name);
    else
      variables[name] = value;
  }
  std::vector<std::string> result;
  for (const auto& [name, value] : variables) result.push_back(name + "=" + value);
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& texts) {
  std::vector<char*> result;
  for (std::string& text : texts) result.push_back(text.data());
  result.push_back(nullptr);
  return result;
}

}  // namespace

// "<kind> <length>\n<text>"
void write_message(int fd, const Message& message) {
  const std::string all = message.kind + " " + std::to_string(message.text.size()) + "\n" + message.text;
  for (size_t done = 0; done < all.size();) {
    const ssize_t n = write(fd, all.data() + done, all.size() - done);
    if (n < 0 && errno == EINTR) continue;
    check(n > 0, "the other side of a rank's pipe is gone");
    done += static_cast<size_t>(n);
  }
}

std::optional<Message> take_message(std::string& received) {
  const size_t space = received.find(' '), end = received.find('\n');
  if (space == std::string::npos || end == std::string::npos) return std::nullopt;
  const size_t length = std::stoul(received.substr(space + 1, end - space - 1));
  if (received.size() < end + 1 + length) return std::nullopt;
  Message message{received.substr(0, space), received.substr(end + 1, length)};
  received.erase(0, end + 1 + length);
  return message;
}

RankProcess::RankProcess(const std::string& mode, const Variables& environment) {
  int commands[2], results[2];
  check(pipe2(commands, O_CLOEXEC) == 0 && pipe2(results, O_CLOEXEC) == 0, "pipe2");
  commands_ = commands[1];
  results_ = results[0];
  // Output goes to memory, not to a file that could be left behind, nor to a pipe that would have to be emptied.
  output_ = memfd_create("rank output", MFD_CLOEXEC);
  check(output_ >= 0, "memfd_create");
  check(fcntl(output_, F_SETFL, O_APPEND) == 0, "fcntl");

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, output_, 1);
  posix_spawn_file_actions_adddup2(&actions, output_, 2);
  posix_spawn_file_actions_adddup2(&actions, commands[0], kCommandFd);
  posix_spawn_file_actions_adddup2(&actions, results[1], kResultFd);

  Variables changes = environment;
  changes.emplace_back(kParentVariable, std::to_string(getpid()));
  std::vector<std::string> arguments{"/proc/self/exe", kWorkerFlag, mode}, variables = with_variables(changes);
  const int error = posix_spawn(&pid_, "/proc/self/exe", &actions, nullptr, pointers(arguments).data(), pointers(variables).data());
  posix_spawn_file_actions_destroy(&actions);
  close(commands[0]);
  close(results[1]);
  errno = error;
  check(error == 0, "posix_spawn");
}

RankProcess::~RankProcess() {
  ask_to_leave();
  for (auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2); !ended_ && std::chrono::steady_clock::now() < until;)
    receive_from({this}, until);
  kill();
  while (!ended_) receive();
  close(results_);
  close(output_);
}

void RankProcess::send(const Message& message) { write_message(commands_, message); }

void RankProcess::receive() {
  if (ended_) return;
  char buffer[4096];
  const ssize_t n = read(results_, buffer, sizeof buffer);
  if (n > 0) received_.append(buffer, static_cast<size_t>(n));
  if (n > 0 || (n < 0 && errno == EINTR)) return;
  while (waitpid(pid_, &status_, 0) < 0 && errno == EINTR) {
  }
  ended_ = true;
  end_time_ = std::chrono::steady_clock::now();
}

std::optional<Message> RankProcess::next_message() { return take_message(received_); }

std::string RankProcess::how_it_ended() const {
  if (WIFEXITED(status_)) return "exit code " + std::to_string(WEXITSTATUS(status_));
  return "signal " + std::to_string(WTERMSIG(status_)) + " (" + strsignal(WTERMSIG(status_)) + ")";
}

void RankProcess::kill() {
  if (!ended_) ::kill(pid_, SIGKILL);
}

void RankProcess::ask_to_leave() {
  if (commands_ >= 0) close(commands_);
  commands_ = -1;
}

void RankProcess::mark_output() { output_mark_ = lseek(output_, 0, SEEK_END); }

std::string RankProcess::output() const {
  constexpr off_t kMost = 8192;
  const off_t size = lseek(output_, 0, SEEK_END), begin = std::max(output_mark_, size - kMost);
  std::string text(static_cast<size_t>(size - begin), '\0');
  const ssize_t n = pread(output_, text.data(), text.size(), begin);
  text.resize(n > 0 ? static_cast<size_t>(n) : 0);
  return text;
}

void receive_from(const std::vector<RankProcess*>& processes, std::chrono::steady_clock::time_point deadline) {
  std::vector<pollfd> waiting;
  std::vector<RankProcess*> owners;
  for (RankProcess* process : processes) {
    if (process->ended()) continue;
    waiting.push_back({process->results_fd(), POLLIN, 0});
    owners.push_back(process);
  }
  if (waiting.empty()) return;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()).count();
  if (poll(waiting.data(), waiting.size(), static_cast<int>(std::max<int64_t>(left, 0))) <= 0) return;
  for (size_t i = 0; i < waiting.size(); ++i)
    if (waiting[i].revents) owners[i]->receive();
}

ReservedPort::ReservedPort() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  const int on = 1;
  setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // else rank 0, which sets it too, could not bind beside us
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  check(fd_ >= 0 && bind(fd_, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
            getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &length) == 0,
        "reserving a port");
  port_ = ntohs(address.sin_port);
}

ReservedPort::~ReservedPort() { close(fd_); }

Variables launch_variables(int rank, int world_size, int port) {
  return {{"RANK", std::to_string(rank)},        {"WORLD_SIZE", std::to_string(world_size)},
          {"LOCAL_RANK", std::to_string(rank)},  {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}, {"TORCHELASTIC_USE_AGENT_STORE", ""},
          {"TORCHELASTIC_RESTART_COUNT", ""},    {"OMP_NUM_THREADS", "1"},
          {"OMP_WAIT_POLICY", "PASSIVE"},        {"GOMP_SPINCOUNT", "0"}};
}

}  // namespace fsdp::testing
