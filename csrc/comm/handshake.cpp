#include "comm/handshake.h"

#include <c10/util/Exception.h>
#include <torch/headeronly/version.h>

#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kPoll{10};
constexpr std::chrono::milliseconds kLinger{2000};
constexpr size_t kNamed = 8;  // a message names at most so many ranks

// A line per field, "name value". Other versions of the library must be able to read it as well: names stay, new ones are ignored
// by those who do not know them, and a missing one reads as "".
std::string write(const Member& member) {
  std::ostringstream out;
  out << "world_size " << member.world_size << "\nlibrary " << member.library_version << "\ntorch " << member.torch_version << "\nbackend "
      << member.backend << "\nrank " << member.rank << "\nhost " << member.host << "\nloopback " << member.loopback << "\npid "
      << member.pid << "\n";
  return out.str();
}

Member read(const std::string& text) {
  std::map<std::string, std::string> fields;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    const size_t space = line.find(' ');
    if (space != std::string::npos) fields[line.substr(0, space)] = line.substr(space + 1);
  }
  Member member;
  member.world_size = std::atoi(fields["world_size"].c_str());
  member.library_version = fields["library"];
  member.torch_version = fields["torch"];
  member.backend = fields["backend"];
  member.rank = std::atoi(fields["rank"].c_str());
  member.host = fields["host"];
  member.loopback = fields["loopback"];
  member.pid = std::atoll(fields["pid"].c_str());
  return member;
}

// "a", "b" and so on: what `value` yields, and who has it.
template <class Value>
std::string difference(const std::vector<Member>& members, const char* what, Value value) {
  std::map<std::string, std::vector<std::string>> holders;
  for (const Member& member : members) holders[c10::str(value(member))].push_back(member.to_string());
  if (holders.size() < 2) return "";
  std::ostringstream out;
  out << what << " differs:";
  for (const auto& [text, who] : holders) {
    out << (text == holders.begin()->first ? " " : "; ") << "'" << text << "' on ";
    for (size_t i = 0; i < std::min(who.size(), kNamed); ++i) out << (i ? ", " : "") << who[i];
    if (who.size() > kNamed) out << " and " << who.size() - kNamed << " more";
  }
  return out.str();
}

std::vector<int> ranks_missing(const std::vector<Member>& members, int world_size) {
  std::vector<bool> here(world_size);
  for (const Member& member : members) here[member.rank] = true;
  std::vector<int> missing;
  for (int rank = 0; rank < world_size; ++rank)
    if (!here[rank]) missing.push_back(rank);
  return missing;
}

std::string first_line(const char* path) {
  std::string line;
  std::getline(std::ifstream(path), line);
  return line;
}

std::string link_target(const char* path) {
  std::array<char, 128> text{};
  const ssize_t length = readlink(path, text.data(), text.size());
  return std::string(text.data(), std::max<ssize_t>(length, 0));
}

// How this process takes part; a struct so that the steps can be named.
struct Handshake {
  Board& board;
  const Member& self;
  const bool hosting;
  const std::chrono::milliseconds limit;
  const Clock::time_point started = Clock::now();
  std::vector<Member> members = {};  // in order of arrival
  int64_t arrivals = 0;              // may be ahead of members: a process counts itself first, then writes

  void arrive() {
    const int64_t place = board.add("arrivals", 1) - 1;
    board.set(c10::str("member/", place), write(self));
  }

  void read_arrivals() {
    arrivals = board.add("arrivals", 0);
    while (static_cast<int64_t>(members.size()) < arrivals) {
      const auto text = board.read(c10::str("member/", members.size()));
      if (!text) break;
      members.push_back(read(*text));
    }
  }

  // The store ends with this process: stay until everybody who came, and `expected` processes in all, have read why. A best effort.
  void linger(int64_t expected) {
    try {
      board.add("left", 1);
      const auto until = Clock::now() + kLinger;
      while (hosting && Clock::now() < until && board.add("left", 0) < std::max(expected, board.add("arrivals", 0)))
        std::this_thread::sleep_for(kPoll);
    } catch (const c10::Error&) {
    }
  }

  [[noreturn]] void give_up(const std::string& key, const std::string& reason, int64_t expected) {
    board.set(key, c10::str(self.to_string(), ": ", reason));
    linger(expected);
    TORCH_CHECK(false, reason);
  }

  // Those who contradict each other were started together, as a rule: the rest is about to come.
  int64_t most_expected() const {
    int most = 0;
    for (const Member& member : members) most = std::max(most, member.world_size);
    return most;
  }

  double elapsed() const { return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started).count() / 1000.0; }

  std::string timeout_message() const {
    const std::vector<int> missing = ranks_missing(members, self.world_size);
    std::ostringstream out;
    out << "rendezvous timed out after " << elapsed() << " s: " << self.world_size - missing.size() << " of " << self.world_size
        << " ranks came; missing: ";
    for (size_t i = 0; i < std::min(missing.size(), kNamed); ++i) out << (i ? ", " : "") << "rank " << missing[i];
    if (missing.size() > kNamed) out << " and " << missing.size() - kNamed << " more";
    return out.str();
  }

  std::vector<Member> run() {
    arrive();
    while (true) {
      read_arrivals();
      if (const std::string found = contradiction(members); !found.empty())
        give_up(kContradictionKey, c10::str("the processes cannot form a group: ", found), most_expected());
      if (static_cast<int>(members.size()) == self.world_size) break;
      if (const auto note = board.read("gave_up")) {
        linger(0);
        TORCH_CHECK(false, "rendezvous was given up by ", *note);
      }
      if (Clock::now() - started >= limit) give_up("gave_up", timeout_message(), 0);
      std::this_thread::sleep_for(kPoll);
    }
    std::sort(members.begin(), members.end(), [](const Member& a, const Member& b) { return a.rank < b.rank; });
    return members;
  }
};

}  // namespace

std::string Member::to_string() const {
  return c10::str("rank ", rank, " (", origin, origin.empty() ? "" : " before the split, ", "host ", host, ", pid ", pid, ")");
}

Member this_process(int rank, int world_size, const std::string& backend) {
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  Member self;
  self.world_size = world_size;
  self.library_version = FSDP_VERSION;
  self.torch_version = TORCH_VERSION;
  self.backend = backend;
  self.rank = rank;
  self.host = host.data();
  // Containers of one machine share the boot, not the network; pids mean the same only within one pid namespace.
  self.loopback =
      first_line("/proc/sys/kernel/random/boot_id") + " " + link_target("/proc/self/ns/net") + " " + link_target("/proc/self/ns/pid");
  self.pid = getpid();
  return self;
}

std::string contradiction(const std::vector<Member>& members) {
  std::string found = difference(members, "WORLD_SIZE", [](const Member& member) { return member.world_size; });
  if (found.empty()) found = difference(members, "the version of libfsdp", [](const Member& member) { return member.library_version; });
  if (found.empty()) found = difference(members, "the version of LibTorch", [](const Member& member) { return member.torch_version; });
  if (found.empty()) found = difference(members, "the backend", [](const Member& member) { return member.backend; });
  if (!found.empty()) return found;
  std::map<int, const Member*> holder;
  for (const Member& member : members) {
    const auto [place, is_new] = holder.emplace(member.rank, &member);
    if (!is_new)
      return c10::str("RANK=", member.rank, " is claimed by two processes: host ", place->second->host, ", pid ", place->second->pid,
                      ", and host ", member.host, ", pid ", member.pid);
  }
  return "";
}

std::vector<Member> shake_hands(Board& board, const Member& self, bool hosting, std::chrono::milliseconds limit) {
  return Handshake{board, self, hosting, limit}.run();
}

}  // namespace fsdp::comm
