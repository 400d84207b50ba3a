/// The group of processes ("ranks") that trains one model.
///
///     fsdp::ProcessGroup group = fsdp::init_process_group();
///     std::cout << "rank " << group.rank() << " of " << group.world_size() << "\n";
///     group.barrier();
///
/// Thread safety: a group is used by one thread at a time. Copies are handles to the same group.
#pragma once

#include <fsdp/export.h>

#include <chrono>
#include <memory>
#include <string>

namespace fsdp {

namespace comm {
class Collectives;
}

struct ProcessGroupOptions {
  /// "auto" (Gloo on CPU) or "gloo". Anything else is an error that lists these.
  std::string backend = "auto";

  /// Longest time that one collective may take before it fails on the waiting rank.
  std::chrono::milliseconds timeout{300'000};

  /// Longest time that init_process_group waits for the other ranks.
  std::chrono::milliseconds rendezvous_timeout{60'000};
};

class FSDP_API ProcessGroup {
 public:
  /// For the library and its tests: wraps an implementation of the collectives seam. REQUIRES: not null.
  explicit ProcessGroup(std::shared_ptr<comm::Collectives> collectives);

  int rank() const;                    ///< 0 ≤ rank() < world_size()
  int world_size() const;              ///< number of processes, at least 1
  const std::string& backend() const;  ///< "single" (one process, nothing communicated) or "gloo"

  /// Returns when every rank has called it. All ranks must call. Throws c10::Error, naming rank and elapsed time, when a rank
  /// is gone or the timeout passes; the group is unusable afterwards.
  void barrier();

  /// Leaves the group: connections are closed, later calls on any copy throw. Not collective, does nothing the second time.
  /// The last copy's destructor does the same and does not throw.
  void close();

  /// The seam itself, for the library's own layers.
  const std::shared_ptr<comm::Collectives>& collectives() const { return collectives_; }

 private:
  std::shared_ptr<comm::Collectives> collectives_;
};

/// Joins the group that the environment describes. All ranks must call, with equal options.
///
/// * None of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set: a group of this one process.
/// * Set as by torchrun: RANK, WORLD_SIZE, LOCAL_RANK (optional), MASTER_ADDR, MASTER_PORT. Rank 0 listens there, on MASTER_ADDR
///   only, or joins torchrun's own store where TORCHELASTIC_USE_AGENT_STORE says so. Where all ranks are on one host, they talk over
///   loopback. WORLD_SIZE=1 is a group of this one process; nothing is opened.
///
/// May be called again, in the same order on all ranks, for further groups.
///
/// Throws c10::Error before anything is opened when a variable is missing, not a number or out of range (naming it and its
/// value); on all ranks when two processes claim one rank, or world sizes, library or torch versions differ (naming who); and
/// after rendezvous_timeout when ranks are missing (naming how many came).
FSDP_API ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace fsdp
