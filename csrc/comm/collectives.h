// The collectives seam: everything that a rank says to another rank passes here.
//
// Vocabulary: N = world size, n = elements per rank. Tensors are contiguous, 1-D, on the group's device, and have the same size and
// dtype on all ranks. Every member except rank(), world_size(), backend() and close() must be called by all ranks, in the same order.
// Ranks that are about to do different things get an error that says what each is about to do, before anything is begun (design note:
// docs/design/agreement.md).
//
// Errors are c10::Error. A wrong argument throws before anything is sent and leaves the group as it was. Every other error names the rank,
// the operation, the purpose and the time since it was started, and fails the group: a group that failed once stays failed, every later
// call throws at once and quotes the first error, and the other ranks learn of it while they wait. After a failure a backend may write to
// the request's tensors for a short while longer (it holds them): their memory must not be taken from under it before the group is
// destroyed.
//
// Streams: on a device that has them an operation reads and writes after everything that the current stream had been given when it
// was begun, and what the stream is given after wait() comes after the operation; wait() need not block the host. So a caller that
// begins an operation when its memory is his, and waits before others use it, has said all that streams and events need to know.
//
// Thread safety: one thread at a time.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace fsdp::comm {

enum class Operation { ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST, BARRIER };
const char* to_string(Operation operation);  // "all_gather", ...

struct Request {
  Operation operation;
  at::Tensor output;    // undefined for a barrier
  at::Tensor input;     // undefined where the operation works in place
  int root = 0;         // BROADCAST: the rank whose values count
  std::string purpose;  // unit and phase, for errors and records: "unit 'blocks.1', forward"
};

// One operation under way, as a backend sees it. Holds what the operation reads and writes until destroyed.
class Work {
 public:
  virtual ~Work() = default;
  virtual void wait() = 0;  // returns when the output is there for the current stream; throws what the backend throws
};

class Collectives;

// The caller's handle of one operation under way. Dropping it without wait() abandons the result, not the operation.
class Pending {
 public:
  Pending() = default;
  bool valid() const { return work_ != nullptr; }
  void wait();  // returns when the output is there; invalid afterwards. REQUIRES: valid()

 private:
  friend class Collectives;
  std::shared_ptr<Collectives> group_;
  std::unique_ptr<Work> work_;
  Request request_;
  std::chrono::steady_clock::time_point started_;
};

class Collectives : public std::enable_shared_from_this<Collectives> {
 public:
  virtual ~Collectives() = default;
  virtual int rank() const = 0;
  virtual int world_size() const = 0;
  virtual const std::string& backend() const = 0;

  // This rank in the words of errors: "rank 1 of 4", and of which group where there are several.
  virtual std::string title() const;

  // output (N·n) receives rank i's input (n) at [i·n, (i+1)·n). In place: input may be that very block of output.
  Pending all_gather(at::Tensor output, at::Tensor input, std::string purpose);

  // output (n) receives the sum over ranks of their input (N·n), block [rank·n, (rank+1)·n), added in rank order.
  // The input's content is lost.
  // In place: output may be that very block of input.
  Pending reduce_scatter(at::Tensor output, at::Tensor input, std::string purpose);

  // tensor (n) receives the sum over ranks.
  Pending all_reduce(at::Tensor tensor, std::string purpose);

  // tensor (n) receives rank `root`'s values.
  Pending broadcast(at::Tensor tensor, int root, std::string purpose);

  void barrier();

  // Every rank's text, in rank order. Texts may differ in length: this is how ranks find out whether they agree.
  std::vector<std::string> exchange(const std::string& topic, const std::string& text);

  // A new group of the ranks that gave the same color, ordered by key and then by rank; null where this rank's color is negative. It
  // has connections, a store and an order of collectives of its own. By default: a group that cannot be split, an error.
  virtual std::shared_ptr<Collectives> split(int color, int key);

  // Empty while the group is healthy.
  const std::string& first_error() const { return first_error_; }

  // From now on ranks compare every operation before they begin it, not only unexpected ones. All ranks must call.
  virtual void check_always() {}

  virtual void close() noexcept = 0;

 protected:
  // What an implementation provides. `start` must not block for other ranks.
  virtual std::unique_ptr<Work> start(const Request& request) = 0;
  // Every rank's text, in rank order. REQUIRES: all ranks exchange texts on this topic, which agree() has seen to.
  virtual std::vector<std::string> exchange_texts(const std::string& topic, const std::string& text) = 0;
  // Called before an operation is begun; throws when other ranks are about to begin another one, on them too. May block for the others.
  virtual void agree(const std::string& /*operation*/) {}
  // Called once, with the first error, before it is thrown: the place to tell the other ranks and to let go of connections.
  virtual void failed(const std::string& /*error*/) noexcept {}

 private:
  friend class Pending;
  Pending launch(Request request);
  void check_healthy(const std::string& description) const;
  // Runs `body`; a failure marks the group failed and is rethrown with rank, description and elapsed time.
  template <class Body>
  auto guarded(const std::string& description, std::chrono::steady_clock::time_point started, Body body);

  std::string first_error_;
};

// A group of one process: outputs are copies of inputs, nothing is communicated.
std::shared_ptr<Collectives> make_single_process();

}  // namespace fsdp::comm
