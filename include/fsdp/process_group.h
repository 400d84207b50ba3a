/// The group of processes ("ranks") that trains one model.
///
///     fsdp::ProcessGroup group = fsdp::init_process_group();
///     std::cout << "rank " << group.rank() << " of " << group.world_size() << "\n";
///     group.barrier();
///
/// Thread safety: a group is used by one thread at a time. Copies are handles to the same group. Two models that train in two threads
/// need a group each (split).
#pragma once

#include <fsdp/export.h>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace fsdp {

namespace comm {
class Collectives;
}

struct ProcessGroupOptions {
  /// "auto" (Gloo on CPU, NCCL on CUDA devices), "gloo" or "nccl". Anything else is an error that lists these.
  std::string backend = "auto";

  /// Longest time that one collective may take before it fails on the waiting rank.
  std::chrono::milliseconds timeout{300'000};

  /// Longest time that init_process_group waits for the other ranks.
  std::chrono::milliseconds rendezvous_timeout{60'000};

  /// This process's place in the group, for programs that know it otherwise than from the environment, of which nothing is read
  /// then. All four or none. Rank 0 listens at master_addr (a name or numeric address of its host), master_port (1 to 65535).
  std::optional<int> rank = {};
  std::optional<int> world_size = {};
  std::optional<std::string> master_addr = {};
  std::optional<int> master_port = {};

  /// Where the tensors lie that the group communicates. Not given: cpu, or with the backend "nccl" the CUDA device of this process's
  /// local rank, as does "cuda" without an index. Only a CUDA device loads CUDA's libraries; do so before LibTorch is used for anything
  /// that asks for CUDA (random numbers do), or link the program to torch_cuda.
  std::optional<c10::Device> device = {};
};

class FSDP_API ProcessGroup {
 public:
  /// For the library and its tests: wraps an implementation of the collectives seam. REQUIRES: not null.
  explicit ProcessGroup(std::shared_ptr<comm::Collectives> collectives);

  /// A group over a backend that was made elsewhere and connects its ranks already, and a store that all of them reach. All ranks
  /// must call. The backend stays the caller's, but serves nobody else while the group lives; the group uses a clone of the store, with
  /// keys that begin with "fsdp/handed_over/", and close() lets go of both. `timeout`: the longest that the other ranks are waited for,
  /// here and in a collective. Throws c10::Error when one is null, and as init_process_group does when processes contradict each other
  /// or do not come. Include <torch/csrc/distributed/c10d/Backend.hpp> and Store.hpp before calling.
  static ProcessGroup take_over(c10::intrusive_ptr<c10d::Backend> backend, c10::intrusive_ptr<c10d::Store> store,
                                std::chrono::milliseconds timeout = std::chrono::minutes(5));

  int rank() const;                    ///< 0 ≤ rank() < world_size()
  int world_size() const;              ///< number of processes, at least 1
  const std::string& backend() const;  ///< "single" (one process, nothing communicated), "gloo", "nccl", or as a c10d backend says

  /// Splits the group: ranks that give the same color form a new one, in which they are ordered by `key` and then by their rank here. A
  /// rank whose color is negative is in none and gets nothing. All ranks must call. This group stays as it is; the new ones have
  /// connections and an order of collectives of their own, may be used by another thread, and outlive it. Errors in them name the
  /// group by its color and say which rank this process had. Throws c10::Error where a store for a part cannot be served (on that
  /// part's ranks), for a group that was taken over, and as collectives do.
  std::optional<ProcessGroup> split(int color, int key = 0);

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

/// Joins the group that the options or the environment describe. All ranks must call, with equal options apart from `rank`. What
/// comes first counts:
///
/// 1. The options rank, world_size, master_addr and master_port.
/// 2. RANK, WORLD_SIZE, LOCAL_RANK (optional), MASTER_ADDR, MASTER_PORT, as torchrun and scripts/launch set them. Without torchrun
///    they must not contradict 3 or 4, unless those speak of a single process.
/// 3. OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK (Open MPI's mpirun). MASTER_ADDR and MASTER_PORT are needed over several hosts only.
/// 4. SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID in a task of srun. MASTER_ADDR is by default the first host of the step's
///    node list, MASTER_PORT a number derived from job and step. In a shell of sbatch or salloc, whose variables speak of tasks
///    that nobody has started, nothing is read: one process.
/// 5. Nothing set: a group of this one process.
///
/// Rank 0 listens at the master's address, on that address only, or joins torchrun's own store where TORCHELASTIC_USE_AGENT_STORE says
/// so. Where all ranks are on one host, they talk over loopback. In a group of one process nothing is opened.
///
/// May be called again, in the same order on all ranks, for further groups.
///
/// Throws c10::Error before anything is opened when an option or variable is missing, not a number, out of range or contradicts
/// another (naming it and its value); on all ranks when two processes claim one rank, or world sizes, library or torch versions differ
/// (naming who); and after rendezvous_timeout when ranks are missing (naming how many came).
FSDP_API ProcessGroup init_process_group(const ProcessGroupOptions& options = {});

}  // namespace fsdp
