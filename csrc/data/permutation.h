// Permutations that every machine computes alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fsdp::data {

// Fills `out` with permutation `number` of [0, out.size()) for `seed`.
//
// Ranks on different machines must agree on it, and a run is resumed after years: only what the C++ standard fixes to the bit is
// used (seed_seq, mt19937_64), not std::shuffle or uniform_int_distribution, which each standard library does its own way.
void permute(std::uint64_t seed, std::uint64_t number, std::vector<std::size_t>& out);

}  // namespace fsdp::data
