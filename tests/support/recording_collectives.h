// A group that writes down what passes through it.
//
//     auto recorded = fsdp::testing::record(group);
//     fsdp::FullyShardedDataParallel model(net, recorded.group);
//     recorded.log->clear();                       // what wrapping exchanged
//     model(x).sum().backward();
//     EXPECT(recorded.log->text() == "all_gather unit 'root', forward\n...", recorded.log->text());
#pragma once

#include "support/decorated_collectives.h"

#include <fsdp/process_group.h>

#include <cstdint>

namespace fsdp::testing {

struct CollectiveRecord {
  std::string operation;  // as the seam's to_string() says, or "exchange"
  std::string purpose;    // of an exchange: its topic
  int64_t bytes = 0;      // of the whole: N·n elements in all_gather and reduce_scatter, n in the others; of an exchange: this rank's text
};

class CollectiveLog {
 public:
  void add(CollectiveRecord record) { records_.push_back(std::move(record)); }
  void clear() {
    records_.clear();
    events_.clear();
  }
  const std::vector<CollectiveRecord>& records() const { return records_; }
  std::string text() const;  // "operation purpose\n" each, in the order in which they were started
  // The same with the waits between them: "start operation purpose\n", "wait operation purpose\n".
  const std::string& events() const { return events_; }
  void add_event(const std::string& event) { events_ += event + "\n"; }
  int64_t count(const std::string& operation) const;
  int64_t bytes(const std::string& operation) const;

 private:
  std::vector<CollectiveRecord> records_;
  std::string events_;
};

class RecordingCollectives : public DecoratedCollectives {
 public:
  RecordingCollectives(std::shared_ptr<comm::Collectives> inner, std::shared_ptr<CollectiveLog> log);

 protected:
  std::unique_ptr<comm::Work> start(const comm::Request& request) override;
  std::vector<std::string> exchange_texts(const std::string& topic, const std::string& text) override;

 private:
  const std::shared_ptr<CollectiveLog> log_;
};

struct RecordedGroup {
  ProcessGroup group;
  std::shared_ptr<CollectiveLog> log;
};

RecordedGroup record(const ProcessGroup& group);

}  // namespace fsdp::testing
