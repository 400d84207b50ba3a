// A thread for calls that may block without limit: the name resolver, c10d's store client (whose receive has no timeout: it waits for
// ever on a host that was stopped, or on a foreign program that listens and says nothing), the making and the end of a Gloo group.
// Whoever asked waits as long as it wants to, and the destructor abandons a call that does not end: its thread, and what the call
// captured, stay until it does. So calls must own what they use.
//
// Calls run one at a time, in order.
#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <utility>

namespace fsdp::comm {

class BoundedThread {
 public:
  BoundedThread();
  ~BoundedThread();  // waits up to 200 ms for the call under way
  BoundedThread(const BoundedThread&) = delete;
  BoundedThread& operator=(const BoundedThread&) = delete;

  template <class F>
  auto start(F call) -> std::future<decltype(call())> {
    auto task = std::make_shared<std::packaged_task<decltype(call())()>>(std::move(call));
    auto result = task->get_future();
    enqueue([task] { (*task)(); });
    return result;
  }

  // Throws c10::Error "`what` did not answer within ..." after `limit`.
  template <class F>
  auto run(std::chrono::milliseconds limit, const std::string& what, F call) {
    auto result = start(std::move(call));
    TORCH_CHECK(result.wait_for(limit) == std::future_status::ready, what, " did not answer within ", limit.count(), " ms");
    return result.get();
  }

 private:
  struct State;
  void enqueue(std::function<void()> call);
  std::shared_ptr<State> state_;
};

}  // namespace fsdp::comm
