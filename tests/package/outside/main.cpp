#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include <cstdio>

int main() {
  fsdp::ProcessGroup group = fsdp::init_process_group();  // finds the other ranks; alone where nobody started it as one of several
  torch::manual_seed(group.rank());

  torch::nn::Sequential net(torch::nn::Linear(2, 256), torch::nn::ReLU(), torch::nn::Linear(256, 256), torch::nn::ReLU(),
                            torch::nn::Linear(256, 1));
  torch::optim::AdamW optimizer(net->parameters(), 3e-3);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(10'000)});
  if (group.rank() == 0) std::puts(model.plan().to_string().c_str());

  for (int step = 1; step <= 200; ++step) {
    auto x = torch::rand({128, 2});  // each rank its own examples
    auto y = torch::sin(6 * x.sum(1, /*keepdim=*/true));
    auto loss = torch::nn::functional::mse_loss(model->forward(x), y);
    loss.backward();
    model.clip_grad_norm_(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (step % 50 == 0) std::printf("step %d: loss %.4f\n", step, loss.item<float>());
  }
}
