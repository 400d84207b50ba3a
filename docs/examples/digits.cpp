// Trains a plain convolutional network on handwritten digits, sharded over the ranks it is started on:
//
//     scripts/launch -n 2 build/bin/digits
//
// Everything that is not LibTorch's is in main(): a process group, one line that shards the model, and the sampler.
#include <fsdp/fsdp.h>

#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <array>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

struct NetImpl : torch::nn::Module {
  static torch::nn::Conv2d conv(int64_t in, int64_t out) { return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).padding(1)); }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::max_pool2d(torch::relu(conv1->forward(x)), 2);  // 28 x 28 to 14 x 14
    x = torch::max_pool2d(torch::relu(conv2->forward(x)), 2);  // to 7 x 7
    x = torch::relu(conv3->forward(x));
    x = torch::max_pool2d(torch::relu(conv4->forward(x)), 2);  // to 3 x 3
    return fc2->forward(torch::relu(fc1->forward(x.flatten(1))));
  }

  torch::nn::Conv2d conv1 = register_module("conv1", conv(1, 32));
  torch::nn::Conv2d conv2 = register_module("conv2", conv(32, 64));
  torch::nn::Conv2d conv3 = register_module("conv3", conv(64, 64));
  torch::nn::Conv2d conv4 = register_module("conv4", conv(64, 64));
  torch::nn::Linear fc1 = register_module("fc1", torch::nn::Linear(64 * 3 * 3, 64));
  torch::nn::Linear fc2 = register_module("fc2", torch::nn::Linear(64, 10));
};
TORCH_MODULE(Net);

// Images and digits in memory; a batch of it is one Example whose tensors have the batch in front.
struct Digits : torch::data::datasets::BatchDataset<Digits, torch::data::Example<>> {
  explicit Digits(const std::vector<std::array<uint8_t, 785>>& rows) {
    const auto all = torch::from_blob(const_cast<uint8_t*>(rows.data()->data()), {static_cast<int64_t>(rows.size()), 785}, torch::kUInt8);
    constexpr double mean = 0.1307, deviation = 0.3081;  // of MNIST's pixels
    images = ((all.narrow(1, 0, 784).to(torch::kFloat) / 255 - mean) / deviation).view({-1, 1, 28, 28});
    digits = all.select(1, 784).to(torch::kLong);
  }

  torch::data::Example<> get_batch(c10::ArrayRef<size_t> indices) override {
    const auto index = torch::tensor(std::vector<int64_t>(indices.begin(), indices.end()));
    return {images.index_select(0, index), digits.index_select(0, index)};
  }
  std::optional<size_t> size() const override { return images.size(0); }

  torch::Tensor images, digits;
};

// A line is 784 pixels from 0 to 255 and the digit. Of each digit, every fifth image is held out.
std::pair<Digits, Digits> read_digits(const std::string& path) {
  std::ifstream file(path);
  TORCH_CHECK(file, "cannot read '", path, "'. Run scripts/fetch-digits, or name the file with --data.");
  std::vector<std::array<uint8_t, 785>> train, held_out;
  std::array<int, 10> seen{};
  for (std::string line; std::getline(file, line);) {
    std::array<uint8_t, 785> row{};
    const char* at = line.data();
    const char* const end = at + line.size();
    for (auto& value : row) {
      const auto [next, error] = std::from_chars(at, end, value);
      TORCH_CHECK(error == std::errc(), "'", path, "', line ", train.size() + held_out.size() + 1, ": expected 785 numbers from 0 to 255.");
      at = next == end ? end : next + 1;
    }
    TORCH_CHECK(at == end && row[784] <= 9, "'", path, "', line ", train.size() + held_out.size() + 1,
                ": expected 784 pixels and a digit.");
    (seen[row[784]]++ % 5 == 4 ? held_out : train).push_back(row);
  }
  TORCH_CHECK(!held_out.empty(), "'", path, "' has too few images to hold any out.");
  return {Digits(train), Digits(held_out)};
}

// Share of right answers. Every rank must call it and goes through all images: the ranks gather parameters together, so they have to
// use the model equally often.
template <class Model>
double accuracy(Model& model, const Digits& data) {
  torch::NoGradGuard no_grad;
  int64_t right = 0;
  for (int64_t begin = 0; begin < data.images.size(0); begin += 250) {
    const auto end = std::min(begin + 250, data.images.size(0));
    right += model(data.images.slice(0, begin, end)).argmax(1).eq(data.digits.slice(0, begin, end)).sum().template item<int64_t>();
  }
  return double(right) / double(data.images.size(0));
}

int64_t moment_bytes(const torch::optim::AdamW& optimizer) {
  int64_t bytes = 0;
  for (const auto& [_, state] : optimizer.state()) {
    const auto& moments = static_cast<const torch::optim::AdamWParamState&>(*state);
    bytes += moments.exp_avg().nbytes() + moments.exp_avg_sq().nbytes();
  }
  return bytes;
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

int main(int argc, char** argv) try {
  CLI::App app("Trains a convolutional network on handwritten digits, sharded over the ranks it is started on.");
  std::string data = ".deps/data/mnist_5k.csv";
  int epochs = 5;
  double required = 0, max_seconds = 600;
  app.add_option("--data", data, "the file that scripts/fetch-digits brings")->capture_default_str();
  app.add_option("--epochs", epochs, "times that each image is trained on")->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--require-accuracy", required, "fail if a smaller share of the held-out images is recognised")->check(CLI::Range(0., 1.));
  app.add_option("--max-seconds", max_seconds, "fail if training takes longer")->capture_default_str()->check(CLI::Range(1., 1e6));
  CLI11_PARSE(app, argc, argv);

  fsdp::ProcessGroup group = fsdp::init_process_group();
  const bool prints = group.rank() == 0;
  const auto [train, held_out] = read_digits(data);

  torch::manual_seed(1);
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  fsdp::FullyShardedDataParallel model(net, group, {.auto_wrap_policy = fsdp::size_based_auto_wrap_policy(10'000)});
  if (prints) std::printf("%s\n", model.plan().to_string().c_str());

  const size_t batch = 96 / group.world_size();  // 96 on all ranks together, so that the result hardly depends on their number
  const auto images_per_step = int64_t(batch) * group.world_size();
  const auto steps = epochs * train.images.size(0) / images_per_step;
  fsdp::DistributedSampler sampler(train.images.size(0), group, {.seed = 1});
  const auto loader = torch::data::make_data_loader(train, sampler, batch);

  const auto start = std::chrono::steady_clock::now();
  int64_t step = 0;
  double share = 0, training_seconds = 0;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    const auto epoch_start = std::chrono::steady_clock::now();
    model.train();
    for (auto& [images, digits] : *loader) {
      auto loss = torch::nn::functional::cross_entropy(model(images), digits);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      if (++step % 20 == 0 && prints) {
        const auto seconds = training_seconds + seconds_since(epoch_start);
        std::printf("step %3ld of %ld   loss %.4f   %5.0f images/s\n", step, steps, loss.item<double>(),
                    double(step * images_per_step) / seconds);
        std::fflush(stdout);
      }
      // Ranks have different clocks: one that stopped here and went on would leave the others alone. It fails, and they with it.
      TORCH_CHECK(seconds_since(start) < max_seconds, "training took longer than ", max_seconds, " s (--max-seconds), at step ", step,
                  " of ", steps);
    }
    training_seconds += seconds_since(epoch_start);
    model.eval();
    share = accuracy(model, held_out);
    if (prints) std::printf("epoch %d of %d: %.1f %% of %ld held-out images\n", epoch + 1, epochs, 100 * share, held_out.images.size(0));
  }

  if (prints) {
    const auto stats = model.stats();
    const double mb = 1e6, plain = double(model.plan().numel()) * sizeof(float) / mb;
    std::printf("\nmemory, MB               each rank   plain model\n");
    std::printf("  parameters              %15.2f   %11.2f\n", double(stats.shard_bytes) / mb, plain);
    std::printf("  gradients               %15.2f   %11.2f\n", double(stats.gradient_bytes) / mb, plain);
    std::printf("  moments of AdamW        %15.2f   %11.2f\n", double(moment_bytes(optimizer)) / mb, 2 * plain);
    std::printf("  unsharded, at most      %15.2f   %11s\n", double(stats.peak_unsharded_bytes) / mb, "-");
    std::printf("\n%ld steps in %.1f s; %.1f %% of the held-out images recognised\n", step, seconds_since(start), 100 * share);
  }
  group.close();
  if (share < required) {
    std::fprintf(stderr, "digits: %.1f %% is less than the %.1f %% of --require-accuracy\n", 100 * share, 100 * required);
    return 1;
  }
  return 0;
} catch (const c10::Error& error) {
  std::fprintf(stderr, "digits: %s\n", error.what_without_backtrace());
  return 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "digits: %s\n", error.what());
  return 1;
}
