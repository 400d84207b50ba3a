#include "comm/sockets.h"

#include <c10/util/Exception.h>

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <utility>

namespace fsdp::comm {

namespace {

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList look_up(const std::string& host, const std::string& port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* list = nullptr;
  const int error = getaddrinfo(host.c_str(), port.empty() ? nullptr : port.c_str(), &hints, &list);
  TORCH_CHECK(error == 0, "host '", host, "' cannot be resolved: ", gai_strerror(error));
  return AddressList(list, freeaddrinfo);
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char text[NI_MAXHOST];
  const int error = getnameinfo(address, length, text, sizeof text, nullptr, 0, NI_NUMERICHOST);
  TORCH_CHECK(error == 0, "an address has no numeric form: ", gai_strerror(error));
  return text;
}

struct LocalEnd {
  explicit LocalEnd(const Socket& socket) {
    const int error = getsockname(socket.fd(), reinterpret_cast<sockaddr*>(&storage), &length);
    TORCH_CHECK(error == 0, "a socket without a local address");
  }
  const sockaddr* address() const { return reinterpret_cast<const sockaddr*>(&storage); }

  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
};

}  // namespace

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Socket::~Socket() {
  if (fd_ >= 0) ::close(fd_);
}

int Socket::release() { return std::exchange(fd_, -1); }

std::vector<std::string> resolve(const std::string& host) {
  std::vector<std::string> result;
  const AddressList list = look_up(host, "", 0);
  for (const addrinfo* entry = list.get(); entry; entry = entry->ai_next) result.push_back(numeric(entry->ai_addr, entry->ai_addrlen));
  return result;
}

void look_up_name(const std::string& address) {
  addrinfo hints{};
  hints.ai_family = AF_INET6;
  hints.ai_flags = AI_NUMERICHOST | AI_V4MAPPED | AI_ALL;
  addrinfo* list = nullptr;
  if (getaddrinfo(address.c_str(), nullptr, &hints, &list) != 0) return;
  const AddressList owned(list, freeaddrinfo);
  char text[NI_MAXHOST];
  getnameinfo(list->ai_addr, list->ai_addrlen, text, sizeof text, nullptr, 0, 0);
}

Attempt listen_on(const std::string& address, uint16_t port) {
  const AddressList list = look_up(address, std::to_string(port), AI_NUMERICHOST | AI_NUMERICSERV);
  Socket socket(::socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int on = 1;
  // REUSEADDR: connections of an earlier group on this port may still be dying (TIME_WAIT).
  if (socket.fd() < 0 || setsockopt(socket.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      bind(socket.fd(), list->ai_addr, list->ai_addrlen) != 0 || listen(socket.fd(), SOMAXCONN) != 0)
    return {Socket(), errno};
  return {std::move(socket), 0};
}

Attempt connect_to(const std::string& address, uint16_t port, std::chrono::milliseconds limit) {
  const AddressList list = look_up(address, std::to_string(port), AI_NUMERICHOST | AI_NUMERICSERV);
  Socket socket(::socket(list->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (socket.fd() < 0) return {Socket(), errno};
  if (connect(socket.fd(), list->ai_addr, list->ai_addrlen) != 0) {
    if (errno != EINPROGRESS) return {Socket(), errno};
    pollfd waiting{socket.fd(), POLLOUT, 0};
    if (poll(&waiting, 1, static_cast<int>(limit.count())) != 1) return {Socket(), ETIMEDOUT};
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size);
    if (error != 0) return {Socket(), error};
  }
  return {std::move(socket), 0};
}

std::string local_address(const Socket& socket) {
  const LocalEnd end(socket);
  return numeric(end.address(), end.length);
}

uint16_t local_port(const Socket& socket) {
  const LocalEnd end(socket);
  // The port lies at the same place in both families of addresses.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&end.storage)->sin_port);
}

}  // namespace fsdp::comm
