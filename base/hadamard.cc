#include "base/hadamard.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <utility>

#include "base/check.h"

namespace kvasir::base {
namespace {

bool IsPrime(int64_t n) {
  if (n < 2) return false;
  for (int64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return true;
}

bool IsPaleyOne(int64_t order) {
  // If order is a multiple of 4, the prime q = order - 1 is 3 mod 4.
  return order % 4 == 0 && IsPrime(order - 1);
}

bool IsPaleyTwo(int64_t order) {
  const int64_t q = order / 2 - 1;
  return order % 4 == 0 && q % 4 == 1 && IsPrime(q);
}

// An exact matrix of order n is K (x) H (hadamard.h). Returns the order of K,
// or nothing if there is no exact matrix of order n.
std::optional<int64_t> KernelOrder(int64_t n) {
  const int64_t odd =
      n >> std::countr_zero(static_cast<uint64_t>(n));  // n = odd * 2^m
  if (odd == 1) return 1;
  for (int64_t order = odd; order <= n; order *= 2) {
    if (IsPaleyOne(order) || IsPaleyTwo(order)) return order;
  }
  return std::nullopt;
}

// A square matrix with entries +1, -1 and 0.
class Signs {
 public:
  explicit Signs(int64_t size)
      : size_(size), values_(static_cast<size_t>(size * size), 0) {}
  int64_t size() const { return size_; }
  int8_t& at(int64_t row, int64_t column) {
    return values_[static_cast<size_t>(row * size_ + column)];
  }
  int8_t at(int64_t row, int64_t column) const {
    return values_[static_cast<size_t>(row * size_ + column)];
  }
  std::vector<int8_t> Take() && { return std::move(values_); }

 private:
  int64_t size_;
  std::vector<int8_t> values_;
};

// Returns the matrix [[0, 1], [corner, Q]] of order q + 1, with the Q
// of hadamard.h.
Signs Bordered(int64_t q, int8_t corner) {
  std::vector<int8_t> character(static_cast<size_t>(q), -1);
  character[0] = 0;
  for (int64_t x = 1; x < q; ++x) {
    character[static_cast<size_t>(x * x % q)] = 1;
  }
  Signs signs(q + 1);
  for (int64_t i = 1; i <= q; ++i) {
    signs.at(0, i) = 1;
    signs.at(i, 0) = corner;
    for (int64_t j = 1; j <= q; ++j) {
      signs.at(i, j) = character[static_cast<size_t>((j - i + q) % q)];
    }
  }
  return signs;
}

Signs PaleyOne(int64_t order) {
  Signs signs = Bordered(order - 1, -1);
  for (int64_t i = 0; i < order; ++i) signs.at(i, i) = 1;
  return signs;
}

Signs PaleyTwo(int64_t order) {
  const Signs conference = Bordered(order / 2 - 1, 1);
  constexpr int8_t kOff[2][2] = {{1, 1}, {1, -1}};
  constexpr int8_t kDiagonal[2][2] = {{1, -1}, {-1, -1}};
  Signs signs(order);
  for (int64_t i = 0; i < order; ++i) {
    for (int64_t j = 0; j < order; ++j) {
      const int8_t c = conference.at(i / 2, j / 2);
      signs.at(i, j) = i / 2 == j / 2
                           ? kDiagonal[i % 2][j % 2]
                           : static_cast<int8_t>(c * kOff[i % 2][j % 2]);
    }
  }
  return signs;
}

Signs Kernel(int64_t order) {
  if (order == 1) {
    Signs one(1);
    one.at(0, 0) = 1;
    return one;
  }
  return IsPaleyOne(order) ? PaleyOne(order) : PaleyTwo(order);
}

int8_t SylvesterSign(int64_t i, int64_t j) {
  return std::popcount(static_cast<uint64_t>(i & j)) % 2 == 0 ? 1 : -1;
}

}  // namespace

std::vector<int64_t> HadamardBlocks(int64_t n) {
  KVASIR_CHECK(n >= 1);
  std::vector<int64_t> blocks;
  while (n > 0) {
    int64_t order = n;
    while (!KernelOrder(order).has_value()) --order;  // order 1 always works
    blocks.push_back(order);
    n -= order;
  }
  return blocks;
}

HadamardKernel HadamardKernelOf(int64_t block_order) {
  const std::optional<int64_t> order = KernelOrder(block_order);
  KVASIR_CHECK(order.has_value());
  return {*order, Kernel(*order).Take()};
}

std::vector<int8_t> HadamardSigns(int64_t n) {
  Signs signs(n);
  int64_t first = 0;
  for (int64_t order : HadamardBlocks(n)) {
    const Signs kernel = Kernel(*KernelOrder(order));
    const int64_t repeat = order / kernel.size();
    for (int64_t i = 0; i < order; ++i) {
      for (int64_t j = 0; j < order; ++j) {
        signs.at(first + i, first + j) =
            static_cast<int8_t>(kernel.at(i / repeat, j / repeat) *
                                SylvesterSign(i % repeat, j % repeat));
      }
    }
    first += order;
  }
  return std::move(signs).Take();
}

std::vector<double> HadamardMatrix(int64_t n) {
  const std::vector<int8_t> signs = HadamardSigns(n);
  std::vector<double> matrix(signs.begin(), signs.end());
  int64_t row = 0;
  for (int64_t order : HadamardBlocks(n)) {
    const double scale = 1.0 / std::sqrt(static_cast<double>(order));
    for (const int64_t end = row + order; row < end; ++row) {
      for (int64_t j = 0; j < n; ++j) {
        matrix[static_cast<size_t>(row * n + j)] *= scale;
      }
    }
  }
  return matrix;
}

}  // namespace kvasir::base
