/// What clipping gradients by their norm found and did.
#pragma once

namespace fsdp {

struct ClipResult {
  double norm = 0;         ///< of all gradients of all ranks, before clipping
  double coefficient = 1;  ///< by which every gradient was multiplied; 1 when nothing was clipped
};

}  // namespace fsdp
