// A folder of checkpoints: names, what is complete, what is deleted. Rank 0 alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fsdp {

// "step-00000042" under root.
std::string checkpoint_path(const std::string& root, int64_t step);

// A folder under root for a checkpoint in the making, new and empty; what interrupted saves left is deleted.
std::string begin_checkpoint(const std::string& root, const std::string& nonce);

// Gives what begin_checkpoint made its final name, on the disk; one that had it is deleted.
void publish_checkpoint(const std::string& temporary, const std::string& path);

// Those under root that have a manifest, the newest first.
std::vector<std::string> list_checkpoints(const std::string& root);

// Deletes what is older than the newest `keep_last` and whose step is no multiple of keep_every.
void delete_old_checkpoints(const std::string& root, int64_t keep_last, int64_t keep_every);

}  // namespace fsdp
