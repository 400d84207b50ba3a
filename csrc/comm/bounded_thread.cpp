#include "comm/bounded_thread.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>

namespace fsdp::comm {

// Shared with the thread, which is detached: it outlives the object when it is abandoned.
struct BoundedThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> calls;
  bool stop = false;
  bool ended = false;

  void work() {
    std::unique_lock lock(mutex);
    while (true) {
      changed.wait(lock, [&] { return stop || !calls.empty(); });
      if (stop) break;
      auto call = std::move(calls.front());
      calls.pop_front();
      lock.unlock();
      call();
      call = nullptr;  // what it captured may block as well when it is destroyed: not under the lock
      lock.lock();
    }
    ended = true;
    changed.notify_all();
  }
};

BoundedThread::BoundedThread() : state_(std::make_shared<State>()) {
  std::thread([state = state_] { state->work(); }).detach();
}

BoundedThread::~BoundedThread() {
  std::deque<std::function<void()>> dropped;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  dropped.swap(state_->calls);
  state_->changed.notify_all();
  state_->changed.wait_for(lock, std::chrono::milliseconds(200), [&] { return state_->ended; });
}

void BoundedThread::enqueue(std::function<void()> call) {
  const std::lock_guard lock(state_->mutex);
  state_->calls.push_back(std::move(call));
  state_->changed.notify_all();
}

}  // namespace fsdp::comm
