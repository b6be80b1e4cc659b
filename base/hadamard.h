// Normalised Hadamard matrices of any size: orthogonal, with entries of one
// magnitude inside a block, so that an outlier channel is spread over its block
// (a trailing block of order 1 leaves its channel alone).
//
// The matrix of size n is block-diagonal; its blocks follow from n alone:
//   - n itself, if an exact Hadamard matrix of that order can be built;
//   - else the largest order that can be built, and then the same for the rest.
// An exact matrix of order n is K (x) H, where H is Sylvester's of order n / K,
// H[i][j] = (-1)^popcount(i & j), and K the smallest order (n / K a power of
// two) among:
//   - 1: the matrix [1];
//   - Paley I, order q + 1, q = 3 mod 4 prime: I + [[0, 1], [-1, Q]];
//   - Paley II, order 2 (q + 1), q = 1 mod 4 prime (Paley I goes first):
//     C (x) [[1, 1], [1, -1]] + I (x) [[1, -1], [-1, -1]], C = [[0, 1], [1,
//     Q]];
// with Q[i][j] = 1 if j - i is a non-zero square mod q, -1 if it is none, 0 on
// the diagonal. This is exact for every multiple of 32 up to 1024.
//
// Do not change: checkpoints carry weights that are fused with these matrices,
// and engines build them anew.
#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::base {

// Orders of the diagonal blocks, from the first block on. Their sum is n >= 1.
std::vector<int64_t> HadamardBlocks(int64_t n);

// The matrix K of a diagonal block: [order, order] signs. `block_order` is one
// of HadamardBlocks.
struct HadamardKernel {
  int64_t order = 1;
  std::vector<int8_t> signs;
};
HadamardKernel HadamardKernelOf(int64_t block_order);

// Entries are +1 and -1 inside the diagonal blocks and 0 outside; [n, n], n >=
// 1.
std::vector<int8_t> HadamardSigns(int64_t n);

// HadamardSigns with each block divided by the root of its order, which makes
// the matrix orthogonal; [n, n], n >= 1.
std::vector<double> HadamardMatrix(int64_t n);

}  // namespace kvasir::base
