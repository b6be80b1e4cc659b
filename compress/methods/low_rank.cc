#include "compress/methods/low_rank.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <string>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "compress/runtime/torch_status.h"
#include "compress/tensors/hadamard_tensor.h"

namespace kvasir::compress {
namespace {

class Stopwatch {
 public:
  double Seconds() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point start_ = Clock::now();
};

std::string ShapeText(const at::Tensor& tensor) {
  if (!tensor.defined()) return "none";
  std::string text = "[";
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    absl::StrAppend(&text, i > 0 ? ", " : "", tensor.size(i));
  }
  return text + "]";
}

// Checks that the tensor is defined, has this shape and holds only finite
// numbers.
absl::Status CheckTensor(absl::string_view what, const at::Tensor& tensor,
                         at::IntArrayRef shape) {
  if (!tensor.defined() || tensor.sizes() != shape) {
    std::string want;
    for (int64_t size : shape) {
      absl::StrAppend(&want, want.empty() ? "" : ", ", size);
    }
    return absl::InvalidArgumentError(absl::StrCat(
        what, " must have the shape [", want, "], has ", ShapeText(tensor)));
  }
  if (!at::isfinite(tensor).all().item<bool>()) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": some numbers are not finite (NaN or infinite)"));
  }
  return absl::OkStatus();
}

absl::Status CheckWeight(const at::Tensor& weight) {
  if (!weight.defined() || weight.dim() != 2 || weight.numel() == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the projection weight must be a matrix [rows, inputs], is ",
        ShapeText(weight)));
  }
  return CheckTensor("projection weight", weight, weight.sizes());
}

// Returns the columns with signs that make the largest entry of each column
// positive. Otherwise a checkpoint would depend on the linear algebra library
// in use.
at::Tensor FixSigns(const at::Tensor& columns) {
  const at::Tensor largest = columns.abs().argmax(0, /*keepdim=*/true);
  const at::Tensor sign = columns.gather(0, largest).sign();
  return columns * at::where(sign == 0, at::ones_like(sign), sign);
}

// Replaces a wide matrix by the smaller triangular factor of its LQ
// decomposition, which has the same singular values and left singular vectors.
// Returns all other matrices unchanged.
at::Tensor Core(const at::Tensor& matrix) {
  if (matrix.size(1) <= matrix.size(0)) return matrix;
  return std::get<1>(at::linalg_qr(matrix.t(), "r")).t();
}

void MeasureLapack(const at::Tensor& matrix, FactorProfile* profile) {
  if (profile == nullptr || !profile->measure_lapack) return;
  const Stopwatch watch;
  (void)at::linalg_svd(matrix, /*full_matrices=*/false);
  profile->lapack_seconds += watch.Seconds();
}

struct LeftSvd {
  at::Tensor vectors;  // [n, min(n, M)]
  at::Tensor values;
};

LeftSvd DecomposeLeft(const at::Tensor& matrix, FactorProfile* profile) {
  const Stopwatch watch;
  auto [left, values, right] =
      at::linalg_svd(Core(matrix), /*full_matrices=*/false);
  if (profile != nullptr) {
    profile->svd_seconds += watch.Seconds();
    ++profile->num_svds;
  }
  MeasureLapack(matrix, profile);
  return {FixSigns(left), values};
}

// Returns the lower triangular L with L Lt = moment + damping.
absl::StatusOr<at::Tensor> DampedCholesky(const at::Tensor& moment) {
  constexpr double kMaxRelativeDamping = 1e-2;
  const double mean_energy = moment.diagonal().mean().item<double>();
  if (!(mean_energy > 0)) {
    return absl::InvalidArgumentError(
        "calibration: the layer's inputs have no variance: they are all zero, "
        "or the same for every token");
  }
  for (double damping = InputMoments::kRelativeDamping;
       damping <= kMaxRelativeDamping; damping *= 10) {
    at::Tensor damped = moment.clone();
    damped.diagonal().add_(damping * mean_energy);
    auto [root, info] = at::linalg_cholesky_ex(damped);
    if (info.item<int64_t>() == 0) return root;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("calibration: the Gram matrix of the inputs is not positive "
                   "definite, even with ",
                   kMaxRelativeDamping,
                   " times the mean of its diagonal added to its diagonal"));
}

InputMoments::Eigen FallingEigen(const at::Tensor& symmetric) {
  auto [values, vectors] = at::linalg_eigh(symmetric, "L");
  return {values.flip(0).clamp_min(0), FixSigns(vectors.flip(1))};
}

absl::Status CheckRank(int64_t rank, int64_t most, absl::string_view why) {
  if (rank >= 1 && rank <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank must be 1..", most, " (", why, "), is ", rank));
}

// Finds factors whose lift has orthonormal columns U. If `centred` is set, U is
// the principal basis about the mean, otherwise the leading left singular
// vectors.
absl::StatusOr<Factors> FactorizeByOutput(const FactorRequest& request,
                                          const at::Tensor& weight) {
  at::Tensor target = weight;
  if (request.centred || request.decomposition == Decomposition::kWhitened) {
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor root,
                            request.centred ? request.moments->CentredRoot()
                                            : request.moments->Root());
    target = at::matmul(weight, root);
  }
  const LeftSvd svd = DecomposeLeft(target, request.profile);
  Factors factors;
  factors.singular_values = svd.values;
  factors.up = svd.vectors.narrow(1, 0, request.rank).contiguous();
  factors.down = at::matmul(factors.up.t(), weight);
  if (request.split_singular_values) {
    at::Tensor root = svd.values.narrow(0, 0, request.rank).sqrt();
    root = at::where(root > 0, root, at::ones_like(root));
    factors.up = factors.up * root;
    factors.down = factors.down / root.unsqueeze(1);
  }
  return factors;
}

absl::StatusOr<Factors> FactorizeByInput(const FactorRequest& request,
                                         const at::Tensor& weight) {
  KVASIR_ASSIGN_OR_RETURN(const InputMoments::Eigen eigen,
                          request.moments->Eigenvectors());
  Factors factors;
  factors.singular_values = eigen.values.sqrt();
  const at::Tensor leading = eigen.vectors.narrow(1, 0, request.rank);
  factors.down = leading.t().contiguous();
  factors.up = at::matmul(weight, leading);
  return factors;
}

absl::Status CheckRequest(const FactorRequest& request) {
  KVASIR_RETURN_IF_ERROR(CheckWeight(request.weight));
  const int64_t rows = request.weight.size(0);
  const int64_t inputs = request.weight.size(1);
  if (request.bias.defined()) {
    KVASIR_RETURN_IF_ERROR(
        CheckTensor("projection bias", request.bias, {rows}));
  }
  KVASIR_RETURN_IF_ERROR(
      CheckRank(request.rank, std::min(rows, inputs),
                absl::StrCat("the projection has ", rows, " rows and ", inputs,
                             " inputs")));
  const bool calibrated =
      request.centred || request.decomposition != Decomposition::kSvd;
  if (!calibrated) return absl::OkStatus();
  if (request.moments == nullptr) {
    return absl::FailedPreconditionError(
        "this decomposition needs the input moments of a calibration, but none "
        "were given");
  }
  if (request.moments->num_inputs() != inputs) {
    return absl::InvalidArgumentError(
        absl::StrCat("the calibration has ", request.moments->num_inputs(),
                     " inputs, but the projection has ", inputs));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<InputMoments> InputMoments::Create(
    const LayerCalibration& calibration, int64_t num_tokens) {
  return CatchTorch([&]() -> absl::StatusOr<InputMoments> {
    if (num_tokens < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the calibration must have at least 1 token, but it has ",
          num_tokens));
    }
    const at::Tensor& gram = calibration.input_gram;
    const int64_t inputs = gram.defined() && gram.dim() == 2 ? gram.size(0) : 0;
    KVASIR_RETURN_IF_ERROR(
        CheckTensor("calibration input_gram", gram, {inputs, inputs}));
    KVASIR_RETURN_IF_ERROR(
        CheckTensor("calibration input_sum", calibration.input_sum, {inputs}));
    InputMoments moments;
    moments.gram_ = gram.to(at::kDouble);
    moments.num_tokens_ = static_cast<double>(num_tokens);
    moments.mean_ = calibration.input_sum.to(at::kDouble) / moments.num_tokens_;
    return moments;
  });
}

absl::StatusOr<at::Tensor> InputMoments::Root() {
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    if (!root_.defined()) {
      KVASIR_ASSIGN_OR_RETURN(root_, DampedCholesky(gram_ / num_tokens_));
    }
    return root_;
  });
}

absl::StatusOr<at::Tensor> InputMoments::CentredRoot() {
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    if (!centred_root_.defined()) {
      KVASIR_ASSIGN_OR_RETURN(
          centred_root_,
          DampedCholesky(gram_ / num_tokens_ - at::outer(mean_, mean_)));
    }
    return centred_root_;
  });
}

absl::StatusOr<InputMoments::Eigen> InputMoments::Eigenvectors() {
  return CatchTorch([&]() -> absl::StatusOr<Eigen> {
    if (!eigen_.values.defined()) eigen_ = FallingEigen(gram_ / num_tokens_);
    return eigen_;
  });
}

absl::StatusOr<Factors> Factorize(const FactorRequest& request) {
  return CatchTorch([&]() -> absl::StatusOr<Factors> {
    KVASIR_RETURN_IF_ERROR(CheckRequest(request));
    const at::Tensor weight = request.weight.to(at::kDouble);
    const bool by_input =
        !request.centred && request.decomposition == Decomposition::kEspace;
    KVASIR_ASSIGN_OR_RETURN(Factors factors,
                            by_input ? FactorizeByInput(request, weight)
                                     : FactorizeByOutput(request, weight));
    if (request.bias.defined()) factors.up_bias = request.bias.to(at::kDouble);
    if (request.centred) {
      const at::Tensor mean = at::matmul(weight, request.moments->mean());
      factors.down_bias = -at::matmul(factors.down, request.moments->mean());
      factors.up_bias =
          factors.up_bias.defined() ? factors.up_bias + mean : mean;
    }
    if (request.hadamard) {
      const at::Tensor rotation = HadamardTensor(request.rank);
      factors.down = at::matmul(rotation, factors.down);
      factors.up = at::matmul(factors.up, rotation.t());
      if (request.centred) {
        factors.down_bias = at::matmul(rotation, factors.down_bias);
      }
    }
    return factors;
  });
}

absl::StatusOr<PrincipalBasis> FindPrincipalBasis(const BasisRequest& request) {
  return CatchTorch([&]() -> absl::StatusOr<PrincipalBasis> {
    const int64_t size = request.gram.defined() && request.gram.dim() == 2
                             ? request.gram.size(0)
                             : 0;
    KVASIR_RETURN_IF_ERROR(
        CheckTensor("calibration key Gram", request.gram, {size, size}));
    KVASIR_RETURN_IF_ERROR(
        CheckTensor("calibration key sum", request.sum, {size}));
    KVASIR_RETURN_IF_ERROR(CheckRank(request.rank, size, "all key channels"));
    if (request.num_tokens < 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the calibration must have at least 1 token, but it has ",
          request.num_tokens));
    }
    const double tokens = static_cast<double>(request.num_tokens);
    PrincipalBasis basis;
    at::Tensor moment = request.gram.to(at::kDouble) / tokens;
    if (request.centred) {
      basis.mean = request.sum.to(at::kDouble) / tokens;
      moment = moment - at::outer(basis.mean, basis.mean);
    }
    const InputMoments::Eigen eigen = FallingEigen(moment);
    basis.singular_values = eigen.values.sqrt();
    basis.rows = eigen.vectors.narrow(1, 0, request.rank).t().contiguous();
    return basis;
  });
}

absl::StatusOr<at::Tensor> SingularValues(const at::Tensor& weight,
                                          FactorProfile* profile) {
  return CatchTorch([&]() -> absl::StatusOr<at::Tensor> {
    KVASIR_RETURN_IF_ERROR(CheckWeight(weight));
    const at::Tensor matrix = weight.to(at::kDouble);
    const Stopwatch watch;
    at::Tensor values = at::linalg_svdvals(Core(matrix));
    if (profile != nullptr) {
      profile->svd_seconds += watch.Seconds();
      ++profile->num_svds;
    }
    MeasureLapack(matrix, profile);
    return values;
  });
}

absl::StatusOr<double> ConditionNumber(const at::Tensor& weight,
                                       FactorProfile* profile) {
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor values,
                          SingularValues(weight, profile));
  return CatchTorch([&]() -> absl::StatusOr<double> {
    const double largest = values[0].item<double>();
    const double floor =
        largest *
        static_cast<double>(std::max(weight.size(0), weight.size(1))) *
        std::numeric_limits<double>::epsilon();
    const double smallest =
        std::max(values[values.size(0) - 1].item<double>(), floor);
    return largest > 0 ? largest / smallest : 1.0;
  });
}

}  // namespace kvasir::compress
