#include "support/own_sockets.h"

#include <arpa/inet.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <set>
#include <sstream>

namespace fsdp::testing {

namespace {

// "socket:[1234]" → "1234"
std::set<std::string> own_inodes() {
  std::set<std::string> result;
  std::error_code ignored;  // descriptors come and go
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", ignored)) {
    const std::string target = std::filesystem::read_symlink(entry.path(), ignored).string();
    if (target.rfind("socket:[", 0) == 0) result.insert(target.substr(8, target.size() - 9));
  }
  return result;
}

// The kernel prints an address as 32-bit words, each in the machine's order: "0100007F:1F90".
std::string address_of(const std::string& text) {
  const std::string words = text.substr(0, text.find(':'));
  std::array<uint32_t, 4> raw{};
  for (size_t i = 0; i * 8 < words.size() && i < raw.size(); ++i)
    raw[i] = static_cast<uint32_t>(std::stoul(words.substr(8 * i, 8), nullptr, 16));
  std::array<char, INET6_ADDRSTRLEN> out{};
  inet_ntop(words.size() == 8 ? AF_INET : AF_INET6, raw.data(), out.data(), out.size());
  return out.data();
}

}  // namespace

std::vector<OwnSocket> own_sockets() {
  const auto inodes = own_inodes();
  std::vector<OwnSocket> result;
  for (const char* protocol : {"tcp", "tcp6", "udp", "udp6"}) {
    std::ifstream table(std::string("/proc/self/net/") + protocol);
    std::string line;
    std::getline(table, line);  // the heading
    while (std::getline(table, line)) {
      std::istringstream in(line);
      std::string number, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      in >> number >> local >> remote >> state >> queues >> timer >> retransmits >> user >> timeout >> inode;
      if (inodes.count(inode)) result.push_back({protocol, address_of(local), address_of(remote), state == "0A"});
    }
  }
  return result;
}

bool is_loopback(const std::string& address) {
  return address.rfind("127.", 0) == 0 || address == "::1" || address.rfind("::ffff:127.", 0) == 0;
}

}  // namespace fsdp::testing
