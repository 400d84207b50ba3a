#include "support/recording_collectives.h"

namespace fsdp::testing {

std::string CollectiveLog::text() const {
  std::string result;
  for (const auto& record : records_) result += record.operation + (record.purpose.empty() ? "" : " ") + record.purpose + "\n";
  return result;
}

int64_t CollectiveLog::count(const std::string& operation) const {
  int64_t result = 0;
  for (const auto& record : records_) result += record.operation == operation;
  return result;
}

int64_t CollectiveLog::bytes(const std::string& operation) const {
  int64_t result = 0;
  for (const auto& record : records_)
    if (record.operation == operation) result += record.bytes;
  return result;
}

namespace {

class RecordedWork final : public comm::Work {
 public:
  RecordedWork(std::unique_ptr<comm::Work> inner, std::shared_ptr<CollectiveLog> log, std::string event)
      : inner_(std::move(inner)), log_(std::move(log)), event_(std::move(event)) {}
  void wait() override {
    inner_->wait();
    log_->add_event("wait " + event_);
  }

 private:
  std::unique_ptr<comm::Work> inner_;
  std::shared_ptr<CollectiveLog> log_;
  std::string event_;
};

}  // namespace

RecordingCollectives::RecordingCollectives(std::shared_ptr<comm::Collectives> inner, std::shared_ptr<CollectiveLog> log)
    : DecoratedCollectives(std::move(inner)), log_(std::move(log)) {}

std::unique_ptr<comm::Work> RecordingCollectives::start(const comm::Request& request) {
  const at::Tensor& whole = request.operation == comm::Operation::REDUCE_SCATTER ? request.input : request.output;
  log_->add({comm::to_string(request.operation), request.purpose, whole.defined() ? static_cast<int64_t>(whole.nbytes()) : 0});
  const std::string event = std::string(comm::to_string(request.operation)) + " " + request.purpose;
  log_->add_event("start " + event);
  return std::make_unique<RecordedWork>(DecoratedCollectives::start(request), log_, event);
}

std::vector<std::string> RecordingCollectives::exchange_texts(const std::string& topic, const std::string& text) {
  log_->add({"exchange", topic, static_cast<int64_t>(text.size())});
  return DecoratedCollectives::exchange_texts(topic, text);
}

RecordedGroup record(const ProcessGroup& group) {
  auto log = std::make_shared<CollectiveLog>();
  return {ProcessGroup(std::make_shared<RecordingCollectives>(group.collectives(), log)), log};
}

}  // namespace fsdp::testing
