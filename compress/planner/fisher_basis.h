// Transforms to channels in which the loss of a cache is half the sum of
// squared errors: the Karhunen-Loeve transform under Fisher's metric. x is a
// key, a value or both, F its information and S its second moment. An error e
// costs tr(F E[e et]) / 2 nats per token. z = Ut F^1/2 x has the error Ut F^1/2
// e, and half the square of this error is the same cost. U holds the
// eigenvectors of F^1/2 S F^1/2, which put the most variance into the fewest
// channels. Ut is U transposed. All tensors are float64 on the CPU. Functions
// throw c10::Error.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// A transform to channels z: z = encode x, and x ~ decode z.
struct FisherBasis {
  at::Tensor encode;     // [R, n]
  at::Tensor decode;     // [n, R]
  at::Tensor variances;  // [R], falling, of the channels of z
};
// Finds the basis of `rank` channels. `moment` and `information` are [n, n]; 1
// <= rank <= n.
FisherBasis FindFisherBasis(const at::Tensor& moment,
                            const at::Tensor& information, int64_t rank);

// The indices of a RoPE pair in the concatenated keys of a group: in head j,
// the numbers at first[j] and second[j] are rotated together.
struct PairOfGroup {
  std::vector<int64_t> first;
  std::vector<int64_t> second;
};

// The basis for keys that rotate. Its maps commute with the rotation, because
// each combines the heads of a group at one pair by complex factors. It is
// found from the averages of moment and information over all rotations.
struct CommutingBasis {
  // For complex channel c: the index of its pair, and the maps between the
  // channel and the heads' numbers at that pair.
  std::vector<int64_t> pairs;  // [C]
  at::Tensor encode;           // [C, s] complex
  at::Tensor decode;           // [s, C] complex
  at::Tensor variances;  // [C], falling; average variance of the real part
};
CommutingBasis FindCommutingBasis(const at::Tensor& moment,
                                  const at::Tensor& information,
                                  const std::vector<PairOfGroup>& pairs);

// RealEncoder and RealDecoder return `encode` and `decode` as real matrices,
// [2C, n] and [n, 2C], where n is the number of dims of the group's heads. All
// real parts come before all imaginary parts.
at::Tensor RealEncoder(const CommutingBasis& basis,
                       const std::vector<PairOfGroup>& pairs, int64_t n);
at::Tensor RealDecoder(const CommutingBasis& basis,
                       const std::vector<PairOfGroup>& pairs, int64_t n);

}  // namespace kvasir::compress
