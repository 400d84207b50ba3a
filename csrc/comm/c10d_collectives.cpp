#include "comm/c10d_collectives.h"

#include "comm/bounded_thread.h"
#include "comm/buffer_pool.h"
#include "comm/failure_watch.h"
#include "comm/sockets.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <sstream>
#include <utility>
#include <vector>

namespace fsdp::comm {

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

constexpr const char* kGloo = "gloo";
constexpr milliseconds kSlice{20};
constexpr milliseconds kEnd{1000};

// LibTorch's flight recorder keeps one map of all groups of the process and grows it without a lock when a group begins its first operation
// (FlightRecorder::recordWithResetEnabled, as of 2.11): two threads with a group each would tear it. So operations begin one at a time;
// they run as before. NCCL's are left out: the first of a group waits for the other ranks, which may be waiting in another group.
std::mutex& beginning() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

// What went wrong, without the place in Gloo's source that its messages begin with: "[.../gloo/transport/tcp/pair.cc:547] Connection ...".
std::string reason_of(const std::exception& error) {
  const auto* named = dynamic_cast<const c10::Error*>(&error);
  std::string text = named ? named->what_without_backtrace() : error.what();
  const size_t end = text.find("] ");
  if (text.starts_with("[") && end != std::string::npos && text.substr(0, end).find("/gloo/") != std::string::npos) text.erase(0, end + 2);
  return text;
}

// Completion of c10d operations as something one can wait for without the exception that Work::wait(timeout) throws each time.
class Completion {
 public:
  explicit Completion(const std::vector<WorkPtr>& works) {
    state_->running = works.size();
    for (const auto& work : works)
      work->getFuture()->addCallback([state = state_](c10::ivalue::Future& future) {
        const std::lock_guard lock(state->mutex);
        --state->running;
        state->failed = state->failed || future.hasError();
        state->changed.notify_all();
      });
  }

  bool wait_for(milliseconds limit) const {
    std::unique_lock lock(state_->mutex);
    return state_->changed.wait_for(lock, limit, [&] { return state_->running == 0 || state_->failed; });
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    size_t running = 0;
    bool failed = false;  // one of them: the others may then never end
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

class C10dWork final : public Work {
 public:
  // `finish` runs once the operation is over.
  C10dWork(std::vector<WorkPtr> works, std::shared_ptr<FailureWatch> watch, milliseconds timeout, std::function<void()> finish)
      : works_(std::move(works)), watch_(std::move(watch)), timeout_(timeout), finish_(std::move(finish)), completion_(works_) {}

  void wait() override {
    while (!completion_.wait_for(kSlice)) {
      watch_->look();
      TORCH_CHECK(Clock::now() - started_ < timeout_, "timed out: not all ranks took part within ", timeout_.count() / 1000.0, " s",
                  watch_->explain(), watch_->last_operations_of_all());
    }
    try {
      for (const auto& work : works_)
        if (work->isCompleted()) work->wait();
    } catch (const std::exception& error) {
      TORCH_CHECK(false, reason_of(error), watch_->explain());
    }
    if (finish_) finish_();
  }

 private:
  const std::vector<WorkPtr> works_;
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

// By Gloo, and NCCL knows more of the same width.
bool is_summed(at::ScalarType type) {
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

// Rank r of a part is rank former[r] of the group that is split.
std::vector<Member> members_of_part(const std::vector<Member>& members, const std::vector<int>& former) {
  std::vector<Member> part;
  for (const int rank : former) {
    Member member = members[rank];
    // Of several splits, the first: that is the number which the launcher's output shows.
    if (member.origin.empty()) member.origin = c10::str("rank ", rank, " of ", members.size());
    member.rank = static_cast<int>(part.size());
    member.world_size = static_cast<int>(former.size());
    part.push_back(std::move(member));
  }
  return part;
}

class C10dCollectives final : public Collectives {
 public:
  // To be connected with connect().
  C10dCollectives(Meeting meeting, MakeBackend make, milliseconds timeout, std::string name)
      : rank_(meeting.rank),
        members_(meeting.members),
        address_(std::move(meeting.address)),
        name_(std::move(name)),
        timeout_(timeout),
        make_(std::move(make)),
        hosted_(std::move(meeting.hosted)),
        watch_(std::make_shared<FailureWatch>(std::move(meeting.board), std::move(meeting.members), rank_, order_)) {}

  ~C10dCollectives() override { close(); }

  int rank() const override { return rank_; }
  int world_size() const override { return static_cast<int>(members_.size()); }
  const std::string& backend() const override { return backend_; }

  std::string title() const override {
    if (name_.empty()) return Collectives::title();
    return c10::str(Collectives::title(), " in group '", name_, "' (", members_[rank_].origin, " before the split)");
  }

  void close() noexcept override {
    const bool healthy = group_ != nullptr;
    if (healthy) watch_->close(hosted_ != nullptr);
    let_go();
    hosted_.reset();
  }

  void check_always() override { checks_always_ = true; }

  std::shared_ptr<Collectives> split(int color, int key) override {
    TORCH_CHECK(make_, title(), ": a group that was taken over cannot be split; split its backend, and take over the parts");
    const std::vector<int> former = ranks_of_color(exchange("split", c10::str(color, " ", key)), color);
    const bool alone = former.size() == 1, leads = former.size() > 1 && former[0] == rank_;
    // A store of its own for each part, served by its rank 0: it lives as long as the part, whatever becomes of the others.
    Attempt listening;
    if (leads) listening = listen_on(address_, 0);
    const auto places = exchange("split, stores", !leads                 ? ""
                                                  : listening.error != 0 ? c10::str("0 ", std::strerror(listening.error))
                                                                         : c10::str(local_port(listening.socket), " ", address_));
    if (color < 0) return nullptr;
    if (alone) return make_single_process();
    std::istringstream place(places[former[0]]);
    uint16_t port = 0;
    std::string where;
    std::getline(place >> port >> std::ws, where);
    TORCH_CHECK(port != 0, title(), ": split: rank ", former[0], " cannot serve a store for color ", color, ": ", where);

    Meeting part;
    if (leads) part.hosted = host_store(where, port, listening.socket.release());
    part.board = std::make_unique<Board>(where, port, "fsdp/", Board::kPatience);
    part.members = members_of_part(members_, former);
    part.rank = static_cast<int>(std::find(former.begin(), former.end(), rank_) - former.begin());
    part.address = address_;
    const std::string name = c10::str(name_, name_.empty() ? "" : " / ", "color ", color);
    auto made = std::make_shared<C10dCollectives>(std::move(part), make_, timeout_, name);
    made->connect(timeout_);
    return made;
  }

  void connect(milliseconds limit) {
    BoundedThread thread;
    auto made = thread.start(
        [make = make_, watch = watch_, rank = rank_, world_size = world_size(), address = address_, limit, timeout = timeout_] {
          return make({watch->board().connection("backend/"), rank, world_size, address, limit, timeout});
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
      take(made.get());
    } catch (const std::exception& error) {
      const std::string text = c10::str(title(), ": connecting to the other ranks failed: ", reason_of(error), watch_->explain());
      watch_->report(text);
      TORCH_CHECK(false, text);
    }
  }

  void take(BackendPtr group) {
    group_ = std::move(group);
    backend_ = group_->getBackendName();
  }

 protected:
  void agree(const std::string& operation) override {
    TORCH_CHECK(group_, "the group has been closed");
    watch_->look_while_young();
    const auto outlook = checks_always_ ? Order::Outlook::UNKNOWN : order_->outlook(operation);
    const bool asks =
        outlook == Order::Outlook::SURPRISE || (outlook == Order::Outlook::UNKNOWN && (backend_ != kGloo || !all_begin(operation)));
    if (asks) watch_->ask(operation, timeout_);
    order_->append(operation);
  }

  std::unique_ptr<Work> start(const Request& request) override {
    // Gloo does not define what an operation on nothing does. All ranks see the same size.
    if (request.operation != Operation::BARRIER && request.output.numel() == 0) return std::make_unique<Done>();
    const at::NoGradGuard no_grad;
    switch (request.operation) {
      case Operation::ALL_GATHER:
        return all_gather(request.output, request.input);
      case Operation::REDUCE_SCATTER:
        return reduce_scatter(request.output, request.input);
      case Operation::ALL_REDUCE:
        return work({all_reduce(request.output)});
      case Operation::BROADCAST:
        return broadcast(request.output, request.root);
      case Operation::BARRIER:
        return work({begin([](auto& group) { return group.barrier(); })});
    }
    TORCH_INTERNAL_ASSERT(false, "unknown operation");
  }

  // Texts travel over the board, since Gloo ends the process when sizes differ. The barrier says when all are there, and fails when
  // a rank is gone, which the board would not tell.
  std::vector<std::string> exchange_texts(const std::string&, const std::string& text) override {
    const auto key = [](int64_t exchange, int rank) { return c10::str("exchange/", exchange, "/", rank); };
    with_board([&](Board& board) { board.set(key(exchanges_, rank_), text); });
    work({begin([](auto& group) { return group.barrier(); })})->wait();
    std::vector<std::string> keys, texts;
    for (int other = 0; other < world_size(); ++other) keys.push_back(key(exchanges_, other));
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
  // Whether all ranks are about to begin this operation. REQUIRES: all ranks call. Not through the board, which takes three times as long.
  bool all_begin(const std::string& operation) {
    auto own = at::full({1}, static_cast<int64_t>(hash_of_operation(operation)), at::kLong);
    auto all = at::empty({world_size()}, at::kLong);
    work({begin([&](auto& group) { return group._allgather_base(all, own); })})->wait();
    return all.eq(own).all().item<bool>();
  }

  static std::vector<int> ranks_of_color(const std::vector<std::string>& wishes, int color) {
    std::vector<std::pair<int, int>> found;  // key and rank
    for (size_t rank = 0; rank < wishes.size(); ++rank) {
      std::istringstream wish(wishes[rank]);
      int its_color = 0, its_key = 0;
      wish >> its_color >> its_key;
      if (its_color == color && color >= 0) found.emplace_back(its_key, static_cast<int>(rank));
    }
    std::sort(found.begin(), found.end());
    std::vector<int> ranks;
    for (const auto& [key, rank] : found) ranks.push_back(rank);
    return ranks;
  }

  template <class Use>
  void with_board(Use use) {
    try {
      use(watch_->board());
    } catch (const c10::Error& error) {
      TORCH_CHECK(false, reason_of(error), watch_->explain());
    }
  }

  // All operations on the backend pass through here.
  template <class Operation>
  WorkPtr begin(Operation operation) {
    std::unique_lock one_at_a_time(beginning(), std::defer_lock);
    if (backend_ == kGloo) one_at_a_time.lock();
    return operation(*group_);
  }

  std::unique_ptr<Work> work(std::vector<WorkPtr> operations, std::function<void()> finish = nullptr) {
    return std::make_unique<C10dWork>(std::move(operations), watch_, timeout_, std::move(finish));
  }

  WorkPtr start_broadcast(const at::Tensor& tensor, int root) {
    std::vector<at::Tensor> tensors{tensor.view(at::kByte)};  // nothing is computed, and bytes serve every dtype
    c10d::BroadcastOptions options;
    options.rootRank = root;
    return begin([&](auto& group) { return group.broadcast(tensors, options); });
  }

  std::unique_ptr<Work> broadcast(const at::Tensor& tensor, int root) { return work({start_broadcast(tensor, root)}); }

  // Every rank broadcasts its block, all at once: c10d's own all-gather receives into a temporary and takes two to three times as long.
  std::unique_ptr<Work> all_gather(const at::Tensor& output, const at::Tensor& input) {
    if (backend_ != kGloo) {
      at::Tensor to = output.view(at::kByte), from = input.view(at::kByte);
      return work({begin([&](auto& group) { return group._allgather_base(to, from); })});
    }
    const auto block = [&](int of) { return output.narrow(0, of * input.numel(), input.numel()); };
    if (block(rank_).data_ptr() != input.data_ptr()) block(rank_).copy_(input);
    std::vector<WorkPtr> works;
    for (int root = 0; root < world_size(); ++root) works.push_back(start_broadcast(block(root), root));
    return work(std::move(works));
  }

  WorkPtr all_reduce(const at::Tensor& tensor) {
    std::vector<at::Tensor> tensors{tensor.is_complex() ? at::view_as_real(tensor).view({-1}) : tensor};
    TORCH_CHECK(is_summed(tensors[0].scalar_type()), "the backend '", backend_, "' cannot add up tensors of ", tensor.scalar_type());
    return begin([&](auto& group) { return group.allreduce(tensors); });
  }

  // Every rank gets the blocks meant for it from each other rank, and adds them up in rank order. Half the bytes of an all-reduce, a
  // third of the time of c10d's own reduce-scatter, and the same sum however it is scattered.
  std::unique_ptr<Work> reduce_scatter(const at::Tensor& output, const at::Tensor& input) {
    if (backend_ != kGloo) {
      at::Tensor to = output, from = input;
      return work({begin([&](auto& group) { return group._reduce_scatter_base(to, from); })});
    }
    const int64_t n = output.numel();
    const auto received = scratch_->take((world_size() - 1) * n, output.scalar_type());
    std::vector<at::Tensor> blocks(world_size());  // by the rank that they come from
    blocks[rank_] = input.narrow(0, rank_ * n, n);
    std::vector<WorkPtr> works;
    for (int distance = 1; distance < world_size(); ++distance) {
      const int to = (rank_ + distance) % world_size(), from = (rank_ + world_size() - distance) % world_size();
      blocks[from] = received.narrow(0, (distance - 1) * n, n);
      auto target = blocks[from].view(at::kByte), source = input.narrow(0, to * n, n).view(at::kByte);
      std::vector<int64_t> target_sizes(world_size()), source_sizes(world_size());
      target_sizes[from] = source_sizes[to] = source.numel();
      works.push_back(begin([&](auto& group) { return group.alltoall_base(target, source, target_sizes, source_sizes); }));
    }
    return work(std::move(works), [output = output, received, blocks = std::move(blocks), scratch = scratch_]() mutable {
      const at::NoGradGuard no_grad;
      // `output` may be the own block, so it is written last.
      for (size_t next = 1; next + 1 < blocks.size(); ++next) blocks[0].add_(blocks[next]);
      at::add_out(output, blocks[0], blocks.back());
      scratch->give_back(received);
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
  const std::vector<Member> members_;  // in rank order
  const std::string address_;          // of this process; empty where the backend was taken over
  const std::string name_;             // of a part; empty for the whole
  std::string backend_;
  const milliseconds timeout_;
  const MakeBackend make_;  // empty where the backend was taken over
  std::shared_ptr<HostedStore> hosted_;
  const std::shared_ptr<Order> order_ = std::make_shared<Order>();
  const std::shared_ptr<FailureWatch> watch_;
  const std::shared_ptr<BufferPool> scratch_ = std::make_shared<BufferPool>();  // outlives operations that nobody waits for
  BackendPtr group_;                                                            // null once closed or failed
  int64_t exchanges_ = 0;
  bool checks_always_ = false;
};

}  // namespace

std::shared_ptr<Collectives> connect_members(Meeting meeting, MakeBackend make, milliseconds timeout, milliseconds connect_limit) {
  auto made = std::make_shared<C10dCollectives>(std::move(meeting), std::move(make), timeout, "");
  made->connect(connect_limit);
  return made;
}

std::shared_ptr<Collectives> take_over_backend(Meeting meeting, BackendPtr backend, milliseconds timeout) {
  auto made = std::make_shared<C10dCollectives>(std::move(meeting), nullptr, timeout, "");
  made->take(std::move(backend));
  return made;
}

}  // namespace fsdp::comm
