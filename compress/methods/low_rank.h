// Low-rank factors of a projection: W ~ up down. The cache holds the latent h =
// down x + down_bias. The lift `up` computes keys or values from it.
//
// There are three ways to find factors. The first two choose orthonormal
// columns U and set up = U, down = Ut W. An error in a latent is then an error
// of the same size in a key. Nothing is divided by a singular value or a
// Cholesky factor, so ill-conditioned calibrations cost no accuracy.
//
// - kSvd: U is from W = U S Vt. This gives the least |W - up down|.
// - kWhitened: U is from W L = U S Vt, where L Lt = E[x xt] is the input's
//   second moment. This gives the least E|W x - up down x|^2, the sum of the
//   squares of the dropped singular values. U also diagonalizes E[k kt].
// - kEspace (Palu, appendix K): up = W P and down = Pt, where the columns of P
//   are the leading eigenvectors of E[x xt]. They depend only on the input. The
//   columns of `up` are not orthonormal. Even at full rank, the factors lose
//   what W does with all other directions of the input.
//
// All tensors are float64 on the CPU. They are rounded once, when a checkpoint
// is written.
//
// Errors: INVALID_ARGUMENT for ranks that the shape does not allow, for shapes
//   that do not fit and for numbers that are not finite; FAILED_PRECONDITION if
//   a calibration is needed and missing.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

#include "absl/status/statusor.h"
#include "compress/calibrate/calibration.h"
#include "compress/methods/method.h"

namespace kvasir::compress {

// Receives the time and work that finding factors takes. Threads: one.
struct FactorProfile {
  int64_t num_svds = 0;
  double svd_seconds = 0;
  // If true, LAPACK's plain gesdd (reduced form) also runs on every matrix, and
  // its time is added to `lapack_seconds` for comparison.
  bool measure_lapack = false;
  double lapack_seconds = 0;
};

// The second moments of a layer's inputs. Each decomposition is computed when
// it is first requested. All groups of a layer share one object. For a Cholesky
// factor, kRelativeDamping * trace / M is added to the diagonal. If this fails,
// as it may with fewer tokens than channels, the factor kRelativeDamping is
// raised tenfold again and again, up to 1e-2, until it succeeds.
// Owns: up to three matrices [M, M].
// Threads: one.
class InputMoments {
 public:
  static constexpr double kRelativeDamping = 1e-8;

  // Creates an object that refers to the calibration's tensors input_gram [M,
  // M] and input_sum [M].
  static absl::StatusOr<InputMoments> Create(
      const LayerCalibration& calibration, int64_t num_tokens);

  int64_t num_inputs() const { return mean_.size(0); }  // M
  const at::Tensor& mean() const { return mean_; }      // E[x]
  // Returns the lower triangular L [M, M] with L Lt = E[x xt] plus damping.
  absl::StatusOr<at::Tensor> Root();
  // Returns the lower triangular L with L Lt = E[(x - E[x]) (x - E[x])t] plus
  // damping.
  absl::StatusOr<at::Tensor> CentredRoot();
  // The eigendecomposition of E[x xt]: falling eigenvalues [M], and
  // eigenvectors as columns [M, M].
  struct Eigen {
    at::Tensor values;
    at::Tensor vectors;
  };
  absl::StatusOr<Eigen> Eigenvectors();

 private:
  InputMoments() = default;

  at::Tensor gram_;
  double num_tokens_ = 0;
  at::Tensor mean_;
  // These results are undefined until they are requested.
  at::Tensor root_;
  at::Tensor centred_root_;
  Eigen eigen_;
};

struct FactorRequest {
  at::Tensor weight;  // [n, M]: the group's rows of the projection
  at::Tensor bias;    // [n], or undefined
  // The moments of the inputs. May be null for kSvd if `centred` is false.
  InputMoments* moments = nullptr;
  int64_t rank = 0;  // 1 .. min(n, M)
  Decomposition decomposition = Decomposition::kWhitened;
  // If true, the latent is W x + bias minus its mean over the calibration, in
  // its principal basis (a plan's BASIS_STATIC with a mean). `decomposition` is
  // then ignored.
  bool centred = false;
  // Rotates the latent by the Hadamard matrix of its rank (HADAMARD_FUSED).
  bool hadamard = false;
  // Puts the square roots of the singular values into the lift, as Palu's code
  // does. A latent's error then differs in size from the error that it causes
  // in a key. Used in measurements, not for serving.
  bool split_singular_values = false;
  FactorProfile* profile = nullptr;  // may be null
};

// Factors with W x + bias ~ up (down x + down_bias) + up_bias.
struct Factors {
  at::Tensor down;       // [R, M], rows by falling singular value
  at::Tensor down_bias;  // [R] if centred, else undefined
  at::Tensor up;         // [n, R]
  at::Tensor up_bias;    // [n]: the bias; if centred, the mean (bias included)
  // All singular values in falling order, [min(n, M)]; for kEspace those of the
  // input, [M]. Their squares are energies per token.
  at::Tensor singular_values;
};
absl::StatusOr<Factors> Factorize(const FactorRequest& request);

// A request for the principal basis of vectors k, such as rotated keys, given
// their second moments.
struct BasisRequest {
  at::Tensor gram;  // [n, n], sum of k kt
  at::Tensor sum;   // [n]
  int64_t num_tokens = 0;
  int64_t rank = 0;  // 1 .. n
  bool centred = false;
};
struct PrincipalBasis {
  at::Tensor rows;             // [R, n], orthonormal, by falling singular value
  at::Tensor mean;             // [n] if centred, else undefined
  at::Tensor singular_values;  // [n]
};
absl::StatusOr<PrincipalBasis> FindPrincipalBasis(const BasisRequest& request);

// Returns the singular values [min(n, M)] of a weight, falling, float64.
absl::StatusOr<at::Tensor> SingularValues(const at::Tensor& weight,
                                          FactorProfile* profile);

// Returns the largest singular value divided by the smallest one. The smallest
// one counts as at least largest * max(n, M) * the rounding unit of float64,
// because smaller values cannot be distinguished from 0. Therefore the
// condition number of a singular matrix is finite. The value for a zero matrix
// is 1.
absl::StatusOr<double> ConditionNumber(const at::Tensor& weight,
                                       FactorProfile* profile);

}  // namespace kvasir::compress
