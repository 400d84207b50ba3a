// The one file that sees Gloo's headers (the LibTorch wheel lacks them). No type of Gloo's own is derived from or called: those
// headers need not be of the version that LibTorch was built with.
#include "comm/gloo.h"

#include "comm/bounded_thread.h"
#include "comm/failure_watch.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <condition_variable>
#include <mutex>
#include <utility>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroupGloo>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr milliseconds kSlice{20};
constexpr milliseconds kEnd{1000};

// What went wrong, without the place in Gloo's source that its messages begin with: "[.../gloo/transport/tcp/pair.cc:547] Connection ...".
std::string reason_of(const std::exception& error) {
  const auto* named = dynamic_cast<const c10::Error*>(&error);
  std::string text = named ? named->what_without_backtrace() : error.what();
  const size_t end = text.find("] ");
  if (text.starts_with("[") && end != std::string::npos && text.substr(0, end).find("/gloo/") != std::string::npos) text.erase(0, end + 2);
  return text;
}

// Completion of a c10d operation as something one can wait for without the exception that Work::wait(timeout) throws each time.
class Completion {
 public:
  explicit Completion(c10d::Work& work) {
    work.getFuture()->addCallback([state = state_](c10::ivalue::Future&) {
      const std::lock_guard lock(state->mutex);
      state->done = true;
      state->changed.notify_all();
    });
  }

  bool wait_for(milliseconds limit) const {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, limit, [&] { return state_->done; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

class GlooWork final : public Work {
 public:
  // `finish` runs once the operation is over.
  GlooWork(WorkPtr work, std::shared_ptr<FailureWatch> watch, milliseconds timeout, std::function<void()> finish)
      : work_(std::move(work)), watch_(std::move(watch)), timeout_(timeout), finish_(std::move(finish)), completion_(*work_) {}

  void wait() override {
    while (!completion_.wait_for(kSlice)) {
      watch_->look();
      TORCH_CHECK(Clock::now() - started_ < timeout_, "timed out: not all ranks took part within ", timeout_.count() / 1000.0, " s",
                  watch_->explain());
    }
    try {
      work_->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, reason_of(error), watch_->explain());
    }
    if (finish_) finish_();
  }

 private:
  const WorkPtr work_;
  const std::shared_ptr<FailureWatch> watch_;
  const milliseconds timeout_;
  const std::function<void()> finish_;
  const Completion completion_;
  const Clock::time_point started_ = Clock::now();
};

class Done final : public Work {
 public:
  void wait() override {}
};

bool gloo_sums(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kInt:
    case at::kLong:
      return true;
    default:
      return false;
  }
}

class Gloo final : public Collectives {
 public:
  Gloo(Meeting meeting, milliseconds timeout, milliseconds connect_limit)
      : rank_(meeting.rank),
        world_size_(static_cast<int>(meeting.members.size())),
        timeout_(timeout),
        hosted_(std::move(meeting.hosted)),
        watch_(std::make_shared<FailureWatch>(std::move(meeting.board), std::move(meeting.members), rank_)) {
    connect(meeting.address, connect_limit);
  }

  ~Gloo() override { close(); }

  int rank() const override { return rank_; }
  int world_size() const override { return world_size_; }
  const std::string& backend() const override { return backend_; }

  void close() noexcept override {
    let_go();
    watch_->stop();
    hosted_.reset();
  }

 protected:
  std::unique_ptr<Work> start(const Request& request) override {
    TORCH_CHECK(group_, "the group has been closed");
    watch_->look_while_young();
    // Gloo does not define what an operation on nothing does. All ranks see the same size.
    if (request.operation != Operation::BARRIER && request.output.numel() == 0) return std::make_unique<Done>();
    const at::NoGradGuard no_grad;
    switch (request.operation) {
      case Operation::ALL_GATHER:
        return all_gather(request.output, request.input);
      case Operation::REDUCE_SCATTER:
        return reduce_scatter(request.output, request.input);
      case Operation::ALL_REDUCE:
        return work(all_reduce(request.output));
      case Operation::BROADCAST:
        return broadcast(request.output, request.root);
      case Operation::BARRIER:
        return work(group_->barrier());
    }
    TORCH_INTERNAL_ASSERT(false, "unknown operation");
  }

  // Texts travel over the board, since Gloo ends the process when sizes differ. The barrier says when all are there, and fails when
  // a rank is gone, which the board would not tell.
  std::vector<std::string> exchange_texts(const std::string& message) override {
    TORCH_CHECK(group_, "the group has been closed");
    watch_->look_while_young();
    const auto key = [](int64_t exchange, int rank) { return c10::str("exchange/", exchange, "/", rank); };
    with_board([&](Board& board) { board.set(key(exchanges_, rank_), message); });
    work(group_->barrier())->wait();
    std::vector<std::string> keys, texts;
    for (int other = 0; other < world_size_; ++other) keys.push_back(key(exchanges_, other));
    with_board([&](Board& board) {
      texts = board.read_all(keys);
      // Everybody has passed the barrier of this exchange, so has read the one before.
      if (exchanges_ > 0) board.remove(key(exchanges_ - 1, rank_));
    });
    ++exchanges_;
    return texts;
  }

  void failed(const std::string& error) noexcept override {
    watch_->report(error);
    let_go();
    watch_->leave(hosted_ != nullptr);
  }

 private:
  void connect(const std::string& address, milliseconds limit) {
    BoundedThread thread;
    auto made = thread.start([watch = watch_, address, limit, rank = rank_, world_size = world_size_, timeout = timeout_] {
      auto options = c10d::ProcessGroupGloo::Options::create(limit);
      options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
      auto group = c10::make_intrusive<c10d::ProcessGroupGloo>(watch->board().connection("gloo/"), rank, world_size, std::move(options));
      group->setTimeout(timeout);
      return group;
    });
    const auto started = Clock::now();
    try {
      while (made.wait_for(kSlice) != std::future_status::ready) {
        watch_->look();
        // Who contradicts this group may have come between the handshake and here; the others then never connect.
        watch_->look_while_young();
        watch_->look_for_members();
        TORCH_CHECK(Clock::now() - started < limit, "not connected within ", limit.count() / 1000.0, " s");
      }
      group_ = made.get();
    } catch (const std::exception& error) {
      const std::string text =
          c10::str("rank ", rank_, " of ", world_size_, ": connecting to the other ranks failed: ", reason_of(error), watch_->explain());
      watch_->report(text);
      TORCH_CHECK(false, text);
    }
  }

  template <class Use>
  void with_board(Use use) {
    try {
      use(watch_->board());
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, reason_of(error), watch_->explain());
    }
  }

  std::unique_ptr<Work> work(WorkPtr operation, std::function<void()> finish = nullptr) {
    return std::make_unique<GlooWork>(std::move(operation), watch_, timeout_, std::move(finish));
  }

  // Bytes, where nothing is computed: that serves every dtype.
  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input) {
    at::Tensor to = output.view(at::kByte), from = input.view(at::kByte);
    return work(group_->_allgather_base(to, from));
  }

  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root) {
    std::vector<at::Tensor> tensors{tensor.view(at::kByte)};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return work(group_->broadcast(tensors, options));
  }

  WorkPtr all_reduce(const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor};
    TORCH_CHECK(gloo_sums(tensors[0].scalar_type()), "Gloo cannot add up tensors of ", tensor.scalar_type());
    return group_->allreduce(tensors);
  }

  std::unique_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input) {
    return work(all_reduce(input), [output = output, block = input.narrow(0, rank_ * output.numel(), output.numel())]() mutable {
      const at::NoGradGuard no_grad;
      if (output.data_ptr() != block.data_ptr()) output.copy_(block);
    });
  }

  // The end of a c10d group waits for its operations. One that waits for a rank which is stopped, not dead, goes on until its own
  // timeout: the group is left to it then, with its connections.
  void let_go() noexcept {
    if (!group_) return;
    try {
      BoundedThread thread;
      thread.start([group = std::move(group_)]() mutable { group.reset(); }).wait_for(kEnd);
    } catch (const std::exception&) {
    }
    group_.reset();
  }

  const int rank_;
  const int world_size_;
  const std::string backend_ = "gloo";
  const milliseconds timeout_;
  std::shared_ptr<HostedStore> hosted_;
  const std::shared_ptr<FailureWatch> watch_;
  GroupPtr group_;  // null once closed or failed
  int64_t exchanges_ = 0;
};

}  // namespace

std::shared_ptr<Collectives> make_gloo(Meeting meeting, milliseconds timeout, milliseconds connect_limit) {
  return std::make_shared<Gloo>(std::move(meeting), timeout, connect_limit);
}

}  // namespace fsdp::comm
