// OSCAR (arXiv 2605.17757): keys and values are rotated before they are coded.
// The rotations are measured on a calibration text.
//
// A key (after RoPE) or value of a KV head is a row x [D]. It becomes x U H P,
// the product with three orthogonal matrices:
// - The columns of U are the eigenvectors of a sum C, those with the largest
//   eigenvalues first. C says in which directions errors matter most. For keys,
//   C is the sum of q qT over all queries q (after RoPE) of the query heads
//   that share the KV head: an error of a key changes a score by its product
//   with q. For values, C is the sum of o oT over the attention outputs o of
//   these heads. An output is the sum of values, weighted by the softmax. These
//   are the paper's formulas. Its public code differs for values: it adds v vT
//   of each value v, weighted by an estimate from queries and keys.
// - H is the Hadamard matrix. After it, errors of all channels matter equally.
// - P puts column i of U H into the channel whose number has the bits of i in
//   reverse order. This spreads the most important columns evenly over the
//   groups of channels that share a range.
// The largest numbers of each row are clipped before it is coded.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

// The sums C of one layer, [Hkv, D, D] float64 on the CPU.
struct OscarSums {
  at::Tensor query;   // the sum of q qT
  at::Tensor output;  // the sum of o oT
};

// Runs an uncompressed model on a text (token ids [B, T]), one sequence per
// thread at a time, and returns the sums of each layer. The number of threads
// does not change the result.
// Errors: those of the decoder.
absl::StatusOr<std::vector<OscarSums>> MeasureOscarSums(
    const ReferenceDecoder& decoder, const at::Tensor& text_ids,
    int threads = 1);

// Returns the matrices U H P of `sums` [Hkv, D, D], in the same shape and
// float64. D must be a power of two.
at::Tensor OscarRotation(const at::Tensor& sums);

// The rotations U H P of one layer, [Hkv, D, D].
struct OscarRotations {
  at::Tensor key;
  at::Tensor value;
};

// How rotated rows are coded. The defaults are the paper's, which codes in 2
// bits. With more bits, less clipping may be better.
struct OscarCode {
  int64_t bits = 2;
  int64_t group = 128;  // number of channels that share a range
  // Numbers are clipped to the magnitude at this share of the row's sorted
  // magnitudes: of 128 numbers, 0.96 clips the 5 largest. 1: no clipping.
  double key_clip = 0.96;
  double value_clip = 0.92;
};

// Rotates keys and values, codes them, and rotates them back. With 16 bits,
// nothing is coded or clipped.
std::unique_ptr<CacheTransform> MakeOscar(std::vector<OscarRotations> by_layer,
                                          const OscarCode& code);

}  // namespace kvasir::compress
