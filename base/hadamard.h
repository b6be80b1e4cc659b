// Hadamard matrices of any size, scaled so that they are orthogonal. They are
// block-diagonal. Multiplying a vector by one spreads an outlier channel evenly
// over its block. A trailing block of order 1 leaves its channel unchanged.
//
// The blocks of the matrix of size n depend only on n:
//   - one block of order n, if an exact Hadamard matrix of that order can
//     be built;
//   - else a block of the largest order that can be built, and the same rule
//     again for the remaining size.
// An exact matrix of order n is K (x) H ((x) is the Kronecker product). K has
// order k, and H is Sylvester's matrix of order n / k, a power of two: H[i][j]
// = (-1)^popcount(i & j). K is the matrix of the smallest possible order among:
//   - 1: the matrix [1];
//   - Paley I, order q + 1, q = 3 mod 4 prime: I + [[0, 1], [-1, Q]];
//   - Paley II, order 2 (q + 1), q = 1 mod 4 prime (Paley I is preferred):
//     C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]],
//     C = [[0, 1], [1, Q]];
// Q[i][j] is 1 if j - i is a non-zero square mod q, -1 if it is not a square,
// and 0 on the diagonal. There is an exact matrix for every multiple of 32 up
// to 1024.
//
// Never change the matrices: the weights in published checkpoints are
// multiplied by them, so every program that reads these must build the same.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::base {

// Returns the orders of the diagonal blocks, first block first. n >= 1 is
// their sum.
std::vector<int64_t> HadamardBlocks(int64_t n);

// The matrix K (see above) of a diagonal block: [order, order] signs.
// `block_order` is an element of HadamardBlocks.
struct HadamardKernel {
  int64_t order = 1;
  std::vector<int8_t> signs;
};
HadamardKernel HadamardKernelOf(int64_t block_order);

// Returns the matrix [n, n] with entries +1 and -1 inside the diagonal blocks
// and 0 outside; n >= 1.
std::vector<int8_t> HadamardSigns(int64_t n);

// Returns HadamardSigns(n) with each block divided by the square root of its
// order, which makes the matrix orthogonal; [n, n], n >= 1.
std::vector<double> HadamardMatrix(int64_t n);

}  // namespace kvasir::base
