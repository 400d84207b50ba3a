#include <fsdp/process_group.h>
#include <torch/torch.h>

#include <iostream>

int main() {
  fsdp::ProcessGroup group = fsdp::init_process_group();
  std::cout << "rank " << group.rank() << " of " << group.world_size() << " sums to " << torch::ones({3}).sum().item<float>() << std::endl;
  group.barrier();
}
