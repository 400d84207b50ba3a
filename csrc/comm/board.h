// The board: the key-value store through which ranks find each other and tell each other of failures, with a limit on every call.
//
// c10d's store does the work. Its calls block without limit when the host of the store was stopped, and more than one thread gets in
// each other's way, so all of them run on one thread of the board's own.
//
// Every call throws c10::Error when the store does not answer within kAnswer or is gone; from then on lost() is true and every call
// throws at once.
#pragma once

#include "comm/bounded_thread.h"

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace c10d {
class Store;
}

namespace fsdp::comm {

// A store served by this process, until the last reference is gone.
class HostedStore;

class Board {
 public:
  static constexpr std::chrono::milliseconds kAnswer{5000};

  // Before it connects, c10d asks the resolver for the name of the address, for its messages; one that does not answer takes five
  // seconds an attempt, which count. Whoever knows that a store listens there can wait for that.
  static constexpr std::chrono::milliseconds kPatience{15'000};
  // c10d tries again and again, with pauses, while it is refused. For those who only know that somebody listens, and try again themselves.
  static constexpr std::chrono::milliseconds kImpatience{1000};

  // Connects to the store at this numeric address, within `connect_limit` and kAnswer at most. All keys get `prefix`.
  Board(const std::string& address, uint16_t port, std::string prefix, std::chrono::milliseconds connect_limit = kImpatience);
  // On somebody's store, of which it uses a clone.
  Board(c10::intrusive_ptr<c10d::Store> store, std::string prefix);
  ~Board();

  void set(const std::string& key, const std::string& text);
  std::optional<std::string> read(const std::string& key);                  // nothing where the key does not exist
  std::vector<std::string> read_all(const std::vector<std::string>& keys);  // REQUIRES: all exist (else it blocks until kAnswer)
  int64_t add(const std::string& key, int64_t amount);                      // returns the sum
  void remove(const std::string& key);

  // Without waiting for the answer, for those who have no time, or something else to wait for. Throw nothing; get() of the result may.
  std::future<std::optional<std::string>> start_read(const std::string& key);
  std::future<void> start_set_once(const std::string& key, const std::string& text);  // of several processes, the first one's stays

  bool lost() const { return !loss_.empty(); }

  // Another connection to the same store, for c10d's own use. Blocks as the store does: call it on a BoundedThread.
  c10::intrusive_ptr<c10d::Store> connection(const std::string& prefix) const;

 private:
  struct Connection;
  using Connect = std::function<c10::intrusive_ptr<c10d::Store>(std::chrono::milliseconds limit)>;
  Board(std::string what, Connect connect, std::string prefix, std::chrono::milliseconds connect_limit);
  template <class F>
  auto start(F f);
  template <class F>
  auto call(F f);

  const std::string what_;  // "the store at 127.0.0.1 port 29500"
  const Connect connect_;
  const std::string prefix_;
  std::shared_ptr<Connection> connection_;  // used on thread_ only
  std::string loss_;                        // why the store is lost, or ""
  BoundedThread thread_;
};

// Serves a store on a socket that listens on `address`:`port`; takes the socket over.
std::shared_ptr<HostedStore> host_store(const std::string& address, uint16_t port, int listening_fd);

}  // namespace fsdp::comm
