// The IP sockets that this process has open, as the kernel tells.
#pragma once

#include <string>
#include <vector>

namespace fsdp::testing {

struct OwnSocket {
  std::string protocol;  // "tcp", "tcp6", "udp" or "udp6"
  std::string local;     // numeric address, without the port
  std::string remote;
  bool listens = false;  // has no other end
};

std::vector<OwnSocket> own_sockets();
bool is_loopback(const std::string& address);

}  // namespace fsdp::testing
