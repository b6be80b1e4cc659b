// Transforms after which the loss of a cache is the sum of its channels'
// squared errors: the Karhunen-Loeve transform under Fisher's metric.
//
// With x a key, a value or both, F its information and S its second moment,
// an error e costs tr(F E[e et]) / 2 nats a token. z = Ut F^1/2 x has the error
// U F^1/2 e, of the same cost: the half of its square. U are the eigenvectors
// of F^1/2 S F^1/2, which put most variance into the fewest channels.
// All tensors are float64 on the CPU. Functions throw c10::Error.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// z = encode x, x ~ decode z.
struct FisherBasis {
  at::Tensor encode;     // [R, n]
  at::Tensor decode;     // [n, R]
  at::Tensor variances;  // [R], falling: of the channels of z
};
// moment, information [n, n]; 1 <= rank <= n.
FisherBasis FindFisherBasis(const at::Tensor& moment,
                            const at::Tensor& information, int64_t rank);

// Rows of a RoPE pair in the vector of a group's heads: of head j the numbers
// first[j] and second[j] turn together.
struct PairOfGroup {
  std::vector<int64_t> first;
  std::vector<int64_t> second;
};

// The same for keys that rotate, by maps that commute with it: complex numbers
// across the heads of a group, at one pair. Moment and information are averaged
// over rotations.
struct CommutingBasis {
  // Of complex channel c: its pair (in the given order), and the maps between
  // it and the heads' numbers at that pair.
  std::vector<int64_t> pairs;  // [C]
  at::Tensor encode;           // [C, s] complex
  at::Tensor decode;           // [s, C] complex
  at::Tensor variances;        // [C], falling; of its real part, on average
};
CommutingBasis FindCommutingBasis(const at::Tensor& moment,
                                  const at::Tensor& information,
                                  const std::vector<PairOfGroup>& pairs);

// The maps as real matrices, [2C, n] and [n, 2C]: all real parts, then all
// imaginary ones; n numbers of the group's heads.
at::Tensor RealEncoder(const CommutingBasis& basis,
                       const std::vector<PairOfGroup>& pairs, int64_t n);
at::Tensor RealDecoder(const CommutingBasis& basis,
                       const std::vector<PairOfGroup>& pairs, int64_t n);

}  // namespace kvasir::compress
