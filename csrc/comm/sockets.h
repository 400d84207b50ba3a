// Plain TCP sockets, as far as ranks need them to find each other before c10d takes over.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace fsdp::comm {

// A file descriptor that closes itself.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(other.release()) {}
  Socket& operator=(Socket&& other) noexcept;
  ~Socket();
  int fd() const { return fd_; }
  int release();

 private:
  int fd_;
};

// The numeric addresses that a host name stands for, in the resolver's order. Throws c10::Error. May block as long as the resolver does.
std::vector<std::string> resolve(const std::string& host);

// Asks the resolver for the name of a numeric address, as c10d does before it connects there: of an IPv4 address in IPv6 form. Blocks as
// long as the resolver does; whether there is a name does not matter.
void look_up_name(const std::string& address);

struct Attempt {
  Socket socket;  // fd() < 0: failed
  int error = 0;  // errno of the failure
};

// A socket that listens on this numeric address only, at a port of the system's choice where `port` is 0. Listening is part of it, not left
// to c10d: two sockets may be bound to one port as long as neither listens, and of two processes that claim rank 0 one must lose here.
Attempt listen_on(const std::string& address, uint16_t port);

// Fails with ETIMEDOUT after `limit`.
Attempt connect_to(const std::string& address, uint16_t port, std::chrono::milliseconds limit);

// The numeric address and the port of this end of a connection, or of a socket that listens.
std::string local_address(const Socket& socket);
uint16_t local_port(const Socket& socket);

}  // namespace fsdp::comm
