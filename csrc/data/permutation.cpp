#include "data/permutation.h"

#include <numeric>
#include <random>
#include <utility>

namespace fsdp::data {
namespace {

// Uniform in [0, bound). The first 2^64 mod bound values of the generator are drawn again: without them the rest splits into
// equal classes mod bound.
std::uint64_t draw_below(std::uint64_t bound, std::mt19937_64& generator) {
  const std::uint64_t surplus = (0 - bound) % bound;  // = 2^64 mod bound, in 64 bits
  std::uint64_t value;
  do {
    value = generator();
  } while (value < surplus);
  return value % bound;
}

}  // namespace

void permute(std::uint64_t seed, std::uint64_t number, std::vector<std::size_t>& out) {
  // seed_seq reads 32 bits of each entry, hence the halves.
  std::seed_seq sequence{seed & 0xffffffffu, seed >> 32, number & 0xffffffffu, number >> 32};
  std::mt19937_64 generator(sequence);
  std::iota(out.begin(), out.end(), std::size_t{0});
  for (std::size_t left = out.size(); left > 1; --left) {  // Fisher-Yates, from the back
    std::swap(out[left - 1], out[draw_below(left, generator)]);
  }
}

}  // namespace fsdp::data
