#include "compress/planner/fisher_basis.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace kvasir::compress {
namespace {

// Eigenvalues below this share of the largest one are raised to it, because
// RootsOf divides by their square roots.
constexpr double kLeastEigenvalue = 1e-12;

struct Roots {
  at::Tensor root;     // F^1/2
  at::Tensor inverse;  // F^-1/2
};

// Computes the square root of the matrix, and the inverse of this root. The
// matrix must be Hermitian, and positive definite up to rounding.
Roots RootsOf(const at::Tensor& matrix) {
  auto [values, vectors] = at::linalg_eigh(matrix);
  const double most = values.max().item<double>();
  TORCH_CHECK(most > 0, "the information is all zero: no channel matters");
  const at::Tensor roots = values.clamp_min(kLeastEigenvalue * most).sqrt();
  const at::Tensor back = vectors.conj().transpose(0, 1);
  return {at::mm(vectors * roots, back), at::mm(vectors / roots, back)};
}

// Eigenvalues, falling, and their eigenvectors as columns. The largest entry of
// each eigenvector is real and positive, so that equal matrices give equal
// bases.
struct Falling {
  at::Tensor values;
  at::Tensor vectors;
};
Falling EigenOf(const at::Tensor& matrix) {
  auto [values, vectors] = at::linalg_eigh(matrix);
  const at::Tensor columns = vectors.flip(1);
  const at::Tensor sizes = columns.abs();
  const at::Tensor index = sizes.argmax(0, /*keepdim=*/true);
  const at::Tensor phase =
      columns.gather(0, index).conj() / sizes.gather(0, index);
  return {values.flip(0).clamp_min(0.0), columns * phase};
}

at::Tensor Symmetric(const at::Tensor& matrix) {
  return (matrix + matrix.conj().transpose(0, 1)) / 2;
}

// Returns E[z zH] / 2 for the complex numbers z of a pair, averaged over all
// rotations.
at::Tensor OverRotations(const at::Tensor& matrix, const PairOfGroup& pair) {
  const at::Tensor first = at::tensor(pair.first, at::kLong);
  const at::Tensor second = at::tensor(pair.second, at::kLong);
  const at::Tensor from_first = matrix.index_select(0, first);
  const at::Tensor from_second = matrix.index_select(0, second);
  return at::complex(
      (from_first.index_select(1, first) + from_second.index_select(1, second))
              .contiguous() /
          2,
      (from_second.index_select(1, first) - from_first.index_select(1, second))
              .contiguous() /
          2);
}

// Returns the complex maps [C, s] as a real matrix [2C, n]: rows for the real
// parts, then rows for the imaginary parts.
at::Tensor RealMatrix(const at::Tensor& maps,
                      const std::vector<int64_t>& channel_pairs,
                      const std::vector<PairOfGroup>& pairs, int64_t n) {
  const auto channels = static_cast<int64_t>(channel_pairs.size());
  const at::Tensor real = at::real(maps).contiguous();
  const at::Tensor imaginary = at::imag(maps).contiguous();
  at::Tensor matrix = at::zeros({2 * channels, n}, at::kDouble);
  const auto from_real = real.accessor<double, 2>();
  const auto from_imaginary = imaginary.accessor<double, 2>();
  auto to = matrix.accessor<double, 2>();
  for (int64_t c = 0; c < channels; ++c) {
    const PairOfGroup& pair =
        pairs[static_cast<size_t>(channel_pairs[static_cast<size_t>(c)])];
    for (size_t j = 0; j < pair.first.size(); ++j) {
      const auto head = static_cast<int64_t>(j);
      to[c][pair.first[j]] = from_real[c][head];
      to[c][pair.second[j]] = -from_imaginary[c][head];
      to[channels + c][pair.first[j]] = from_imaginary[c][head];
      to[channels + c][pair.second[j]] = from_real[c][head];
    }
  }
  return matrix;
}

}  // namespace

FisherBasis FindFisherBasis(const at::Tensor& moment,
                            const at::Tensor& information, int64_t rank) {
  const Roots roots = RootsOf(Symmetric(information.to(at::kDouble)));
  const Falling eigen = EigenOf(Symmetric(
      roots.root.mm(Symmetric(moment.to(at::kDouble))).mm(roots.root)));
  const at::Tensor vectors = eigen.vectors.narrow(1, 0, rank);
  return {vectors.t().mm(roots.root).contiguous(),
          roots.inverse.mm(vectors).contiguous(),
          eigen.values.narrow(0, 0, rank).contiguous()};
}

CommutingBasis FindCommutingBasis(const at::Tensor& moment,
                                  const at::Tensor& information,
                                  const std::vector<PairOfGroup>& pairs) {
  std::vector<at::Tensor> encode;
  std::vector<at::Tensor> decode;
  std::vector<at::Tensor> variances;
  std::vector<int64_t> channel_pairs;
  for (size_t p = 0; p < pairs.size(); ++p) {
    const Roots roots = RootsOf(
        Symmetric(OverRotations(information.to(at::kDouble), pairs[p])));
    const Falling eigen = EigenOf(Symmetric(
        roots.root
            .mm(Symmetric(OverRotations(moment.to(at::kDouble), pairs[p])))
            .mm(roots.root)));
    encode.push_back(eigen.vectors.conj().transpose(0, 1).mm(roots.root));
    decode.push_back(roots.inverse.mm(eigen.vectors));
    variances.push_back(eigen.values);
    channel_pairs.insert(channel_pairs.end(), pairs[p].first.size(),
                         static_cast<int64_t>(p));
  }
  const at::Tensor all = at::cat(variances).contiguous();
  const double* const size = all.data_ptr<double>();
  std::vector<int64_t> order(channel_pairs.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [size](int64_t a, int64_t b) { return size[a] > size[b]; });
  const at::Tensor index = at::tensor(order, at::kLong);
  CommutingBasis basis;
  for (const int64_t channel : order) {
    basis.pairs.push_back(channel_pairs[static_cast<size_t>(channel)]);
  }
  basis.encode = at::cat(encode, 0).index_select(0, index);
  basis.decode = at::cat(decode, 1).index_select(1, index);
  basis.variances = all.index_select(0, index);
  return basis;
}

at::Tensor RealEncoder(const CommutingBasis& basis,
                       const std::vector<PairOfGroup>& pairs, int64_t n) {
  return RealMatrix(basis.encode, basis.pairs, pairs, n);
}

at::Tensor RealDecoder(const CommutingBasis& basis,
                       const std::vector<PairOfGroup>& pairs, int64_t n) {
  // The real matrix of a decoder is the transpose of the matrix that RealMatrix
  // makes from the conjugate transposed decoder.
  return RealMatrix(basis.decode.conj().transpose(0, 1), basis.pairs, pairs, n)
      .t()
      .contiguous();
}

}  // namespace kvasir::compress
