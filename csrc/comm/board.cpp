#include "comm/board.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace fsdp::comm {

namespace {

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

c10::intrusive_ptr<c10d::TCPStore> connect(const std::string& address, uint16_t port, std::chrono::milliseconds limit) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = false;
  options.waitWorkers = false;
  options.timeout = limit;
  auto store = c10::make_intrusive<c10d::TCPStore>(address, options);
  store->setTimeout(Board::kAnswer);
  return store;
}

std::optional<std::string> read_if_there(c10d::Store& store, const std::string& key) {
  if (!store.check({key})) return std::nullopt;
  return text(store.get(key));
}

}  // namespace

class HostedStore {
 public:
  c10::intrusive_ptr<c10d::TCPStore> store;
};

std::shared_ptr<HostedStore> host_store(const std::string& address, uint16_t port, int listening_fd) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = true;
  options.waitWorkers = false;
  options.timeout = Board::kPatience;  // it connects to itself
  // Without a socket of ours c10d would listen on every interface, for anybody.
  options.masterListenFd = listening_fd;
  auto hosted = std::make_shared<HostedStore>();
  hosted->store = c10::make_intrusive<c10d::TCPStore>(address, options);
  return hosted;
}

struct Board::Connection {
  c10::intrusive_ptr<c10d::Store> store;
  // c10d prints a page on each use of a connection that has failed: once is enough.
  bool failed = false;
};

Board::Board(const std::string& address, uint16_t port, std::string prefix, std::chrono::milliseconds connect_limit)
    : Board(
          c10::str("the store at ", address, " port ", port),
          [address, port](std::chrono::milliseconds limit) { return connect(address, port, limit); }, std::move(prefix), connect_limit) {}

Board::Board(c10::intrusive_ptr<c10d::Store> store, std::string prefix)
    : Board(
          "the store that was handed over",
          [store = std::move(store)](std::chrono::milliseconds) {
            auto clone = store->clone();
            clone->setTimeout(kAnswer);
            return clone;
          },
          std::move(prefix), kPatience) {}

Board::Board(std::string what, Connect connect, std::string prefix, std::chrono::milliseconds connect_limit)
    : what_(std::move(what)), connect_(std::move(connect)), prefix_(std::move(prefix)), connection_(std::make_shared<Connection>()) {
  thread_.run(connect_limit + kAnswer, what_, [connection = connection_, prefix = prefix_, connect = connect_, connect_limit] {
    connection->store = c10::make_intrusive<c10d::PrefixStore>(prefix, connect(connect_limit));
  });
}

// The connection is closed on the thread, in turn: a call under way keeps its store.
Board::~Board() {
  thread_.start([connection = std::move(connection_)] { connection->store.reset(); });
}

template <class F>
auto Board::start(F f) {
  return thread_.start([connection = connection_, f = std::move(f)] {
    TORCH_CHECK(!connection->failed, "its connection has failed");
    try {
      return f(*connection->store);
    } catch (const std::exception&) {
      connection->failed = true;
      throw;
    }
  });
}

template <class F>
auto Board::call(F f) {
  TORCH_CHECK(!lost(), loss_);
  auto answer = start(std::move(f));
  if (answer.wait_for(kAnswer) == std::future_status::ready) {
    try {
      return answer.get();
    } catch (const c10::Error& error) {
      loss_ = c10::str(what_, " is gone: ", error.what_without_backtrace());
    }
  } else {
    loss_ = c10::str(what_, " did not answer within ", kAnswer.count() / 1000.0, " s");
  }
  C10_THROW_ERROR(Error, loss_);
}

void Board::set(const std::string& key, const std::string& value) {
  call([key, value](c10d::Store& store) { store.set(key, bytes(value)); });
}

std::optional<std::string> Board::read(const std::string& key) {
  return call([key](c10d::Store& store) { return read_if_there(store, key); });
}

std::vector<std::string> Board::read_all(const std::vector<std::string>& keys) {
  return call([keys](c10d::Store& store) {
    std::vector<std::string> result;
    for (const auto& value : store.multiGet(keys)) result.push_back(text(value));
    return result;
  });
}

int64_t Board::add(const std::string& key, int64_t amount) {
  return call([key, amount](c10d::Store& store) { return store.add(key, amount); });
}

void Board::remove(const std::string& key) {
  call([key](c10d::Store& store) { store.deleteKey(key); });
}

std::future<std::optional<std::string>> Board::start_read(const std::string& key) {
  return start([key](c10d::Store& store) { return read_if_there(store, key); });
}

std::future<void> Board::start_set_once(const std::string& key, const std::string& value) {
  return start([key, value](c10d::Store& store) {
    if (store.add(key + "/writers", 1) == 1) store.set(key, bytes(value));
  });
}

c10::intrusive_ptr<c10d::Store> Board::connection(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_ + prefix, connect_(kPatience));
}

}  // namespace fsdp::comm
