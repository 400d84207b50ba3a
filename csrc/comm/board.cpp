#include "comm/board.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace fsdp::comm {

namespace {

std::vector<uint8_t> bytes(const std::string& text) { return {text.begin(), text.end()}; }
std::string text(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

c10::intrusive_ptr<c10d::TCPStore> connect(const std::string& address, uint16_t port) {
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = false;
  options.waitWorkers = false;
  // c10d tries again and again, with pauses, while it is refused. The caller knows that somebody listens there, and tries again itself.
  options.timeout = std::chrono::milliseconds(1000);
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
  options.timeout = Board::kAnswer;
  // Without a socket of ours c10d would listen on every interface, for anybody.
  options.masterListenFd = listening_fd;
  auto hosted = std::make_shared<HostedStore>();
  hosted->store = c10::make_intrusive<c10d::TCPStore>(address, options);
  return hosted;
}

Board::Board(const std::string& address, uint16_t port, std::string prefix)
    : address_(address), port_(port), prefix_(std::move(prefix)), store_(std::make_shared<c10::intrusive_ptr<c10d::Store>>()) {
  thread_.run(kAnswer, c10::str("what listens at ", address, " port ", port), [store = store_, prefix = prefix_, address, port] {
    *store = c10::make_intrusive<c10d::PrefixStore>(prefix, connect(address, port));
  });
}

// The connection is closed on the thread, in turn: a call under way keeps its store.
Board::~Board() {
  thread_.start([store = std::move(store_)] { store->reset(); });
}

template <class F>
auto Board::call(F f) {
  TORCH_CHECK(!lost(), loss_);
  const std::string what = c10::str("the store at ", address_, " port ", port_);
  try {
    return thread_.run(kAnswer, what, [store = store_, f = std::move(f)] { return f(**store); });
  } catch (const c10::Error& error) {
    // What c10d says about it (a failed receive) begins with "Failed to recv"; the reader wants to know whose.
    const std::string reason = error.what_without_backtrace();
    loss_ = reason.starts_with(what) ? reason : c10::str(what, " is gone: ", reason);
    TORCH_CHECK(false, loss_);
  }
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
  return thread_.start([store = store_, key] { return read_if_there(**store, key); });
}

c10::intrusive_ptr<c10d::Store> Board::connection(const std::string& prefix) const {
  return c10::make_intrusive<c10d::PrefixStore>(prefix_ + prefix, connect(address_, port_));
}

}  // namespace fsdp::comm
