#include "compress/methods/low_rank.h"

#include <ATen/CPUGeneratorImpl.h>

#include <cmath>
#include <limits>

#include "base/status_matchers.h"
#include "compress/tensors/hadamard_tensor.h"

namespace kvasir::compress {
namespace {

using ::kvasir::base::StatusIs;
using ::testing::HasSubstr;

// Returns inputs [T, M] whose channels differ in size and are correlated.
// `offset` moves their mean away from zero.
at::Tensor Inputs(int64_t tokens, int64_t channels, double offset) {
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const at::Tensor noise =
      at::randn({tokens, channels}, generator, at::kDouble);
  const at::Tensor mix =
      at::randn({channels, channels}, generator, at::kDouble);
  const at::Tensor size = at::linspace(3, 0.1, channels, at::kDouble);
  return at::matmul(noise * size, mix) + offset;
}

at::Tensor Random(at::IntArrayRef shape, uint64_t seed) {
  return at::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed),
                   at::kFloat);
}

LayerCalibration CalibrationOf(const at::Tensor& inputs) {
  LayerCalibration calibration;
  calibration.input_gram = at::matmul(inputs.t(), inputs);
  calibration.input_sum = inputs.sum(0);
  return calibration;
}

InputMoments MomentsOf(const at::Tensor& inputs) {
  return *InputMoments::Create(CalibrationOf(inputs), inputs.size(0));
}

double Norm(const at::Tensor& tensor) { return tensor.norm().item<double>(); }

double Distance(const at::Tensor& a, const at::Tensor& b) {
  return Norm(a - b) / Norm(b);
}

at::Tensor Product(const Factors& factors) {
  return at::matmul(factors.up, factors.down);
}

double RootOfDropped(const Factors& factors, int64_t rank) {
  return Norm(factors.singular_values.narrow(
      0, rank, factors.singular_values.size(0) - rank));
}

constexpr int64_t kRows = 12;
constexpr int64_t kInputs = 20;

class LowRankTest : public ::testing::Test {
 protected:
  at::Tensor inputs_ = Inputs(400, kInputs, 0.7);
  InputMoments moments_ = MomentsOf(inputs_);
  at::Tensor weight_ = Random({kRows, kInputs}, 1);
  at::Tensor bias_ = Random({kRows}, 2);

  FactorRequest Request(Decomposition decomposition, int64_t rank) {
    return {.weight = weight_,
            .moments = &moments_,
            .rank = rank,
            .decomposition = decomposition};
  }
  // Returns the root mean square of the error that the factors cause in the
  // outputs W x, over all inputs x.
  double OutputError(const Factors& factors) {
    const at::Tensor missed = weight_.to(at::kDouble) - Product(factors);
    return Norm(at::matmul(inputs_, missed.t())) /
           std::sqrt(static_cast<double>(inputs_.size(0)));
  }
};

TEST_F(LowRankTest, FactorsOfFullRankReproduceTheWeights) {
  for (Decomposition decomposition :
       {Decomposition::kSvd, Decomposition::kWhitened}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors,
                                Factorize(Request(decomposition, kRows)));
    EXPECT_LT(Distance(Product(factors), weight_.to(at::kDouble)), 1e-12);
  }
}

TEST_F(LowRankTest,
       TheErrorOfAPlainSvdIsTheRootOfTheSumOfDroppedSquaredSingularValues) {
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors,
                              Factorize(Request(Decomposition::kSvd, 5)));
  EXPECT_NEAR(Norm(weight_.to(at::kDouble) - Product(factors)),
              RootOfDropped(factors, 5), 1e-10);
}

TEST_F(LowRankTest,
       TheWhitenedErrorIsTheRootOfTheSumOfDroppedSquaredSingularValues) {
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors,
                              Factorize(Request(Decomposition::kWhitened, 5)));
  KVASIR_ASSERT_OK_AND_ASSIGN(at::Tensor root, moments_.Root());
  const at::Tensor missed = weight_.to(at::kDouble) - Product(factors);
  const double dropped = RootOfDropped(factors, 5);
  EXPECT_NEAR(Norm(at::matmul(missed, root)), dropped, 1e-10 * dropped);
  // Up to the damping, `dropped` is also the error of the outputs W x.
  EXPECT_NEAR(OutputError(factors), dropped, 1e-5 * dropped);
}

TEST_F(LowRankTest, WhitenedFactorsEqualThoseFoundWithATriangularSolve) {
  constexpr int64_t kRank = 5;
  KVASIR_ASSERT_OK_AND_ASSIGN(
      Factors factors, Factorize(Request(Decomposition::kWhitened, kRank)));
  KVASIR_ASSERT_OK_AND_ASSIGN(at::Tensor root, moments_.Root());
  const auto [u, s, vh] =
      at::linalg_svd(at::matmul(weight_.to(at::kDouble), root), false);
  // Computes S Vt L^-1 by solving Lt y = (S Vt)t for y.
  const at::Tensor scaled =
      s.narrow(0, 0, kRank).unsqueeze(1) * vh.narrow(0, 0, kRank);
  const at::Tensor down =
      at::linalg_solve_triangular(root.t(), scaled.t(), /*upper=*/true).t();
  EXPECT_LT(Distance(Product(factors), at::matmul(u.narrow(1, 0, kRank), down)),
            1e-8);
}

TEST_F(LowRankTest, WhitenedFactorsLoseLessOfTheOutputThanOtherDecompositions) {
  for (int64_t rank : {2, 5, 9}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        Factors whitened, Factorize(Request(Decomposition::kWhitened, rank)));
    KVASIR_ASSERT_OK_AND_ASSIGN(Factors plain,
                                Factorize(Request(Decomposition::kSvd, rank)));
    KVASIR_ASSERT_OK_AND_ASSIGN(
        Factors espace, Factorize(Request(Decomposition::kEspace, rank)));
    EXPECT_LT(OutputError(whitened), OutputError(plain));
    EXPECT_LT(OutputError(whitened), OutputError(espace));
  }
}

TEST_F(LowRankTest, AGroupOfHeadsLosesNoMoreThanItsHeadsFactorizedSeparately) {
  // There are four heads of 4 dims. A group of one head gets rank 2, a group of
  // two heads rank 4, and a group of all four heads rank 8.
  weight_ = Random({16, kInputs}, 8);
  double previous = std::numeric_limits<double>::infinity();
  for (const int64_t heads : {1, 2, 4}) {
    double lost = 0;
    for (int64_t first = 0; first < 4; first += heads) {
      FactorRequest request = Request(Decomposition::kWhitened, 2 * heads);
      request.weight = weight_.narrow(0, 4 * first, 4 * heads);
      KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
      lost += std::pow(RootOfDropped(factors, 2 * heads), 2);
    }
    EXPECT_LT(lost, previous);
    previous = lost;
  }
}

TEST_F(LowRankTest, AnOrthonormalLiftLeavesTheSingularValuesInTheLatent) {
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors,
                              Factorize(Request(Decomposition::kWhitened, 6)));
  EXPECT_LT(
      Distance(at::matmul(factors.up.t(), factors.up), at::eye(6, at::kDouble)),
      1e-12);
  const at::Tensor latents = at::matmul(inputs_, factors.down.t());
  const at::Tensor energy =
      // Root mean square of each channel over tokens.
      (latents * latents).mean(0).sqrt();
  EXPECT_LT(Distance(energy, factors.singular_values.narrow(0, 0, 6)), 1e-5);
}

TEST_F(LowRankTest,
       SplittingTheSingularValuesChangesTheLatentButNotTheProduct) {
  FactorRequest request = Request(Decomposition::kWhitened, 6);
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors whole, Factorize(request));
  request.split_singular_values = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors split, Factorize(request));
  EXPECT_LT(Distance(Product(split), Product(whole)), 1e-12);
  const at::Tensor energy =
      at::matmul(inputs_, split.down.t()).square().mean(0).sqrt();
  EXPECT_LT(Distance(energy, split.singular_values.narrow(0, 0, 6).sqrt()),
            1e-5);
}

TEST_F(LowRankTest, EspaceProjectsTheInputOnItsLeadingEigenvectors) {
  FactorRequest request = Request(Decomposition::kEspace, 4);
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
  EXPECT_LT(Distance(at::matmul(factors.down, factors.down.t()),
                     at::eye(4, at::kDouble)),
            1e-12);
  const at::Tensor projected =
      at::matmul(at::matmul(inputs_, factors.down.t()), factors.down);
  EXPECT_NEAR(Norm(inputs_ - projected) / std::sqrt(400.0),
              RootOfDropped(factors, 4), 1e-9);
  // Two projections of one layer have the same `down`, because it depends only
  // on the input.
  request.weight = Random({kRows, kInputs}, 3);
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors other, Factorize(request));
  EXPECT_EQ(Distance(other.down, factors.down), 0);
}

TEST_F(LowRankTest, CentredFactorsOfFullRankReproduceTheOutput) {
  FactorRequest request = Request(Decomposition::kWhitened, kRows);
  request.bias = bias_;
  request.centred = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
  const at::Tensor latents =
      at::matmul(inputs_, factors.down.t()) + factors.down_bias;
  EXPECT_LT(Norm(latents.mean(0)), 1e-9);
  const at::Tensor rebuilt =
      at::matmul(latents, factors.up.t()) + factors.up_bias;
  const at::Tensor exact =
      at::matmul(inputs_, weight_.to(at::kDouble).t()) + bias_;
  EXPECT_LT(Distance(rebuilt, exact), 1e-12);
}

TEST_F(LowRankTest, CentringLosesLessIfOutputsHaveANonzeroMean) {
  const at::Tensor inputs = Inputs(400, kInputs, 30);
  InputMoments moments = MomentsOf(inputs);
  const at::Tensor exact = at::matmul(inputs, weight_.to(at::kDouble).t());
  double errors[2];
  for (const bool centred : {false, true}) {
    FactorRequest request = Request(Decomposition::kWhitened, 4);
    request.moments = &moments;
    request.centred = centred;
    KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
    at::Tensor rebuilt = at::matmul(inputs, Product(factors).t());
    if (centred) {
      rebuilt =
          rebuilt + at::matmul(factors.up, factors.down_bias) + factors.up_bias;
    }
    errors[centred] = Norm(rebuilt - exact);
  }
  EXPECT_LT(errors[true], errors[false]);
}

TEST_F(LowRankTest, WithoutCentringTheBiasIsAddedAfterTheLift) {
  FactorRequest request = Request(Decomposition::kWhitened, 4);
  request.bias = bias_;
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
  EXPECT_FALSE(factors.down_bias.defined());
  EXPECT_EQ(Distance(factors.up_bias, bias_.to(at::kDouble)), 0);
}

TEST_F(LowRankTest, AHadamardRotationOfTheLatentDoesNotChangeTheProduct) {
  FactorRequest request = Request(Decomposition::kWhitened, 8);
  request.centred = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors plain, Factorize(request));
  request.hadamard = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors rotated, Factorize(request));
  EXPECT_LT(Distance(Product(rotated), Product(plain)), 1e-12);
  const at::Tensor h = HadamardTensor(8);
  EXPECT_LT(Distance(rotated.down, at::matmul(h, plain.down)), 1e-12);
  EXPECT_LT(Distance(rotated.down_bias, at::matmul(h, plain.down_bias)), 1e-12);
}

TEST_F(LowRankTest, FactorsAreFoundEvenWithFewerTokensThanChannels) {
  const at::Tensor few = Inputs(6, kInputs, 0.7);
  InputMoments moments = MomentsOf(few);
  for (const bool centred : {false, true}) {
    FactorRequest request = Request(Decomposition::kWhitened, 6);
    request.moments = &moments;
    request.centred = centred;
    KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
    // There are only six inputs. Their outputs span at most six directions, so
    // a rank of 6 loses nothing.
    at::Tensor rebuilt = at::matmul(few, Product(factors).t());
    if (centred) {
      rebuilt =
          rebuilt + at::matmul(factors.up, factors.down_bias) + factors.up_bias;
    }
    EXPECT_LT(Distance(rebuilt, at::matmul(few, weight_.to(at::kDouble).t())),
              1e-3);
  }
}

TEST_F(LowRankTest, TheLiftOfARankDeficientWeightIsOrthonormal) {
  weight_ = at::matmul(Random({kRows, 3}, 4), Random({3, kInputs}, 5));
  for (Decomposition decomposition :
       {Decomposition::kSvd, Decomposition::kWhitened}) {
    for (const bool split : {false, true}) {
      FactorRequest request = Request(decomposition, 8);
      request.split_singular_values = split;
      KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
      EXPECT_LT(Distance(Product(factors), weight_.to(at::kDouble)), 1e-6);
      EXPECT_TRUE(at::isfinite(factors.down).all().item<bool>());
      if (split) continue;
      EXPECT_LT(Distance(at::matmul(factors.up.t(), factors.up),
                         at::eye(8, at::kDouble)),
                1e-12);
    }
  }
}

TEST_F(LowRankTest, FactorsAreFoundForWeightsWithMoreRowsThanColumns) {
  weight_ = Random({30, kInputs}, 6);
  KVASIR_ASSERT_OK_AND_ASSIGN(
      Factors factors, Factorize(Request(Decomposition::kWhitened, kInputs)));
  EXPECT_LT(Distance(Product(factors), weight_.to(at::kDouble)), 1e-9);
}

TEST_F(LowRankTest, ARankLargerThanTheMatrixAllowsIsRefused) {
  for (int64_t rank : {int64_t{0}, kRows + 1}) {
    EXPECT_THAT(Factorize(Request(Decomposition::kSvd, rank)),
                StatusIs(absl::StatusCode::kInvalidArgument,
                         HasSubstr("rank must be 1..12")));
  }
}

TEST_F(LowRankTest, NumbersThatAreNotFiniteAreRefused) {
  weight_[3][4] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(Factorize(Request(Decomposition::kWhitened, 4)),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("weight: some numbers are not finite")));
  LayerCalibration calibration = CalibrationOf(inputs_);
  calibration.input_sum[0] = std::numeric_limits<double>::infinity();
  EXPECT_THAT(InputMoments::Create(calibration, 400),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("input_sum: some numbers are not finite")));
}

TEST_F(LowRankTest, AMissingOrMismatchedCalibrationIsRefused) {
  FactorRequest request = Request(Decomposition::kWhitened, 4);
  request.moments = nullptr;
  EXPECT_THAT(Factorize(request),
              StatusIs(absl::StatusCode::kFailedPrecondition,
                       HasSubstr("needs the input moments of a calibration")));
  request.decomposition = Decomposition::kSvd;
  KVASIR_EXPECT_OK(Factorize(request));
  request.weight = Random({kRows, kInputs + 1}, 1);
  request.moments = &moments_;
  request.decomposition = Decomposition::kWhitened;
  EXPECT_THAT(Factorize(request),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("has 20 inputs, but the projection has 21")));
}

TEST_F(LowRankTest, InputsThatAreAllZeroAreRefused) {
  InputMoments moments = MomentsOf(at::zeros({9, kInputs}, at::kDouble));
  FactorRequest request = Request(Decomposition::kWhitened, 4);
  request.moments = &moments;
  EXPECT_THAT(Factorize(request), StatusIs(absl::StatusCode::kInvalidArgument,
                                           HasSubstr("they are all zero")));
}

TEST_F(LowRankTest, ThePrincipalBasisEqualsThatOfCentredFactors) {
  const at::Tensor keys = at::matmul(inputs_, weight_.to(at::kDouble).t());
  KVASIR_ASSERT_OK_AND_ASSIGN(
      PrincipalBasis basis,
      FindPrincipalBasis({.gram = at::matmul(keys.t(), keys),
                          .sum = keys.sum(0),
                          .num_tokens = 400,
                          .rank = 5,
                          .centred = true}));
  FactorRequest request = Request(Decomposition::kWhitened, 5);
  request.centred = true;
  KVASIR_ASSERT_OK_AND_ASSIGN(Factors factors, Factorize(request));
  EXPECT_LT(Distance(basis.rows, factors.up.t()), 1e-5);
  EXPECT_LT(Distance(basis.mean, factors.up_bias), 1e-12);
  EXPECT_LT(Distance(basis.singular_values, factors.singular_values), 1e-5);
}

TEST_F(LowRankTest, SingularMatricesHaveTheGreatestConditionNumber) {
  const at::Tensor diagonal = at::diag(at::tensor({8.0f, 4.0f, 0.5f, 0.0f}));
  KVASIR_ASSERT_OK_AND_ASSIGN(double number,
                              ConditionNumber(diagonal, nullptr));
  const double greatest = 1 / (4 * std::numeric_limits<double>::epsilon());
  EXPECT_EQ(number, greatest);
  // The closer a matrix is to a singular one, the larger its condition number
  // is, even for differences that float32 could not represent.
  double before = 1;
  for (const float smallest : {1e-2f, 1e-5f, 1e-7f, 1e-9f, 1e-30f}) {
    KVASIR_ASSERT_OK_AND_ASSIGN(
        const double next,
        ConditionNumber(at::diag(at::tensor({8.0f, smallest})), nullptr));
    EXPECT_GT(next, before);
    before = next;
  }
  KVASIR_ASSERT_OK_AND_ASSIGN(double of_zero,
                              ConditionNumber(at::zeros({3, 5}), nullptr));
  EXPECT_EQ(of_zero, 1);
}

TEST_F(LowRankTest, TheProfileCountsDecompositionsAndMeasuresTheTimeOfLapack) {
  FactorProfile profile{.measure_lapack = true};
  FactorRequest request = Request(Decomposition::kWhitened, 4);
  request.profile = &profile;
  KVASIR_ASSERT_OK(Factorize(request));
  KVASIR_ASSERT_OK(SingularValues(weight_, &profile));
  EXPECT_EQ(profile.num_svds, 2);
  EXPECT_GT(profile.svd_seconds, 0);
  EXPECT_GT(profile.lapack_seconds, 0);
}

}  // namespace
}  // namespace kvasir::compress
