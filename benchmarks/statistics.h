#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace benchmark {

// Between the sorted values, as Python's statistics.quantiles does it with method="inclusive". REQUIRES: not empty
inline double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<size_t>(at);
  const double above = values[std::min(below + 1, values.size() - 1)];
  return values[below] + (at - static_cast<double>(below)) * (above - values[below]);
}

}  // namespace benchmark
