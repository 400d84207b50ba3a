#include "comm/rendezvous.h"

#include "comm/sockets.h"

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr milliseconds kPoll{20};
constexpr milliseconds kConnect{1000};
constexpr milliseconds kBeforeStandingIn{1000};
constexpr milliseconds kSlowNaming{500};
// Who refuses to talk for so long is not a store that is about to end, but something else.
constexpr milliseconds kStranger{3000};

// What this process remembers of a place (MASTER_ADDR, MASTER_PORT) between groups.
struct Place {
  std::weak_ptr<HostedStore> hosted;  // another group of this process may serve the store already
  std::string address;
  int meetings = 0;  // that succeeded; numbers the keys of the next
};

struct Places {
  std::mutex mutex;
  std::map<std::pair<std::string, uint16_t>, Place> known;
};

// Never destroyed: a group may be closed by a static destructor.
Places& places() {
  static Places* const all = new Places;
  return *all;
}

milliseconds since(Clock::time_point start) { return std::chrono::duration_cast<milliseconds>(Clock::now() - start); }

class Search {
 public:
  Search(const Environment& environment, const Member& self, milliseconds limit) : environment_(environment), self_(self), limit_(limit) {}

  Meeting run() {
    resolve_master();
    while (true) {
      std::optional<Meeting> meeting = find_store();
      if (meeting && shake(*meeting)) return std::move(*meeting);
      TORCH_CHECK(since(started_) < limit_, "rendezvous timed out after ", limit_.count() / 1000.0, " s: ", last_failure_, " (",
                  environment_.place, "); are all ranks started, with the same address and port?");
      std::this_thread::sleep_for(kPoll);
    }
  }

 private:
  // What `look` finds out, or changes, about this place.
  template <class Look>
  auto at_place(Look look) const {
    const std::lock_guard lock(places().mutex);
    return look(places().known[{environment_.master_addr, environment_.master_port}]);
  }

  milliseconds left() const { return std::max(limit_ - since(started_), milliseconds(1)); }

  void resolve_master() {
    BoundedThread thread;
    try {
      addresses_ = thread.run(limit_, "the name resolver", [host = environment_.master_addr] { return resolve(host); });
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, error.what_without_backtrace(), " (", environment_.place, ")");
    }
  }

  // A board on the store, served by this process or another; nothing where there is none yet.
  std::optional<Meeting> find_store() {
    Meeting meeting;
    const Place place = at_place([](const Place& here) { return here; });
    meeting.hosted = place.hosted.lock();
    if (meeting.hosted) return connect(std::move(meeting), place.address);
    const bool may_serve = !environment_.agent_store && (environment_.rank == 0 || since(started_) >= kBeforeStandingIn);
    for (const std::string& address : addresses_) {
      if (may_serve && serve(meeting, address)) return connect(std::move(meeting), address);
      if (auto found = connect(Meeting(), address)) return found;
    }
    return std::nullopt;
  }

  bool serve(Meeting& meeting, const std::string& address) {
    Attempt attempt = listen_on(address, environment_.master_port);
    if (attempt.error == 0) {
      meeting.hosted = host_store(address, environment_.master_port, attempt.socket.release());
      at_place([&](Place& place) {
        place.hosted = meeting.hosted;
        place.address = address;
      });
      return true;
    }
    // In use: by the store, or by a stranger; connecting will show. Another rank may well not own the address.
    TORCH_CHECK(attempt.error == EADDRINUSE || environment_.rank != 0, "rank 0 cannot listen at ", address, " (", environment_.place,
                "): ", std::strerror(attempt.error));
    taken_ = attempt.error == EADDRINUSE;
    return false;
  }

  std::optional<Meeting> connect(Meeting meeting, const std::string& address) {
    const uint16_t port = environment_.master_port;
    Attempt attempt = connect_to(address, port, std::min(left(), kConnect));
    if (attempt.error != 0) {
      last_failure_ = c10::str("nobody listens at ", address, ": ", std::strerror(attempt.error));
      if (taken_) fail_if_stranger();
      return std::nullopt;
    }
    meeting.address = local_address(attempt.socket);
    meeting.rank = environment_.rank;
    attempt.socket = Socket();  // it only showed that somebody listens, which c10d would find out noisily
    const auto asked = Clock::now();
    try {
      meeting.board = std::make_unique<Board>(address, port, prefix(), connect_limit_);
    } catch (const c10::Error& error) {
      last_failure_ = error.what_without_backtrace();
      if (since(asked) >= Board::kImpatience && connect_limit_ < Board::kPatience && naming_is_slow(address)) {
        connect_limit_ = Board::kPatience;
        return std::nullopt;
      }
      if (since(asked) >= connect_limit_ + Board::kAnswer) stranger_since_ = asked - kStranger;  // it had its time
      fail_if_stranger();
      return std::nullopt;
    }
    return meeting;
  }

  // Was it the resolver that took the time? On hosts whose resolver is out of reach it takes ten seconds, every time.
  static bool naming_is_slow(const std::string& address) {
    const auto asked = Clock::now();
    try {
      BoundedThread().run(Board::kPatience, "the name resolver", [address] { look_up_name(address); });
    } catch (const c10::Error&) {
    }
    return since(asked) >= kSlowNaming;
  }

  void fail_if_stranger() {
    if (!stranger_since_) stranger_since_ = Clock::now();
    TORCH_CHECK(since(*stranger_since_) < kStranger, "port ", environment_.master_port, " is taken by another program (",
                environment_.place, "): ", last_failure_, "; set another MASTER_PORT");
  }

  std::string prefix() const {
    return c10::str("fsdp/", environment_.restart_count, "/", at_place([](const Place& place) { return place.meetings; }), "/");
  }

  // False where the store ended before the group was complete: it was the store of an earlier group on its way out, or its
  // process died; look again.
  bool shake(Meeting& meeting) {
    try {
      meeting.members = shake_hands(*meeting.board, self_, meeting.hosted != nullptr, left());
    } catch (const c10::Error& error) {
      if (!meeting.board->lost()) throw;
      last_failure_ = error.what_without_backtrace();
      return false;
    }
    bool one_host = true;
    for (const Member& member : meeting.members) one_host = one_host && member.loopback == self_.loopback;
    if (one_host) meeting.address = "127.0.0.1";
    at_place([](Place& place) { ++place.meetings; });
    return true;
  }

  const Environment& environment_;
  const Member& self_;
  const milliseconds limit_;
  const Clock::time_point started_ = Clock::now();
  std::vector<std::string> addresses_;
  std::string last_failure_ = "nobody was found";
  bool taken_ = false;
  milliseconds connect_limit_ = Board::kImpatience;
  std::optional<Clock::time_point> stranger_since_;
};

}  // namespace

Meeting meet(const Environment& environment, const Member& self, milliseconds limit) { return Search(environment, self, limit).run(); }

Meeting meet_at(const c10::intrusive_ptr<c10d::Store>& store, const Member& self, milliseconds limit) {
  const std::string prefix = "fsdp/handed_over/";
  // Nobody begins the next meeting before all have come to this one.
  const int64_t meeting_number = (Board(store, prefix).add("arrivals", 1) - 1) / self.world_size;
  Meeting meeting;
  meeting.board = std::make_unique<Board>(store, c10::str(prefix, meeting_number, "/"));
  meeting.members = shake_hands(*meeting.board, self, /*hosting=*/false, limit);
  meeting.rank = self.rank;
  return meeting;
}

}  // namespace fsdp::comm
