#include "compress/planner/kappa.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace kvasir::compress {
namespace {

constexpr size_t kRankedTrials = 5;

std::vector<double> RanksOf(const std::vector<double>& numbers) {
  std::vector<double> ranks;
  for (const double number : numbers) {
    const auto below = std::count_if(numbers.begin(), numbers.end(),
                                     [&](double n) { return n < number; });
    const auto equal = std::count(numbers.begin(), numbers.end(), number);
    ranks.push_back(static_cast<double>(below) +
                    static_cast<double>(equal - 1) / 2);
  }
  return ranks;
}

}  // namespace

double SpearmanCorrelation(const std::vector<double>& a,
                           const std::vector<double>& b) {
  KVASIR_CHECK(!a.empty() && a.size() == b.size());
  const std::vector<double> ranks_a = RanksOf(a);
  const std::vector<double> ranks_b = RanksOf(b);
  const double mean = static_cast<double>(a.size() - 1) / 2;
  double both = 0;
  double squares_a = 0;
  double squares_b = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    both += (ranks_a[i] - mean) * (ranks_b[i] - mean);
    squares_a += (ranks_a[i] - mean) * (ranks_a[i] - mean);
    squares_b += (ranks_b[i] - mean) * (ranks_b[i] - mean);
  }
  const double size = std::sqrt(squares_a * squares_b);
  return size > 0 ? both / size : 0;
}

double Quantile(std::vector<double> numbers, double share) {
  KVASIR_CHECK(!numbers.empty());
  std::sort(numbers.begin(), numbers.end());
  const double place = share * static_cast<double>(numbers.size() - 1);
  const auto below = static_cast<size_t>(place);
  const size_t above = std::min(below + 1, numbers.size() - 1);
  return numbers[below] + (place - static_cast<double>(below)) *
                              (numbers[above] - numbers[below]);
}

absl::StatusOr<FittedKappa> FitKappa(std::vector<PlanTrial> trials) {
  if (trials.empty()) {
    return absl::InvalidArgumentError(
        "kappa cannot be fitted: no plan was measured");
  }
  std::vector<double> ratios;
  std::vector<double> predicted;
  std::vector<double> measured;
  for (const PlanTrial& trial : trials) {
    if (!(trial.predicted > 0) || !(trial.measured > 0) ||
        !std::isfinite(trial.predicted + trial.measured)) {
      return absl::InvalidArgumentError(
          absl::StrCat("a plan of ", trial.bytes,
                       " bytes per token is predicted to diverge by ",
                       trial.predicted, " nats and measured to diverge by ",
                       trial.measured, "; both must be finite and above 0"));
    }
    ratios.push_back(trial.measured / trial.predicted);
    predicted.push_back(trial.predicted);
    measured.push_back(trial.measured);
  }
  FittedKappa kappa;
  kappa.median = Quantile(ratios, 0.5);
  kappa.low = Quantile(ratios, 0.16);
  kappa.high = Quantile(ratios, 0.84);
  if (trials.size() >= kRankedTrials) {
    kappa.spearman = SpearmanCorrelation(predicted, measured);
  }
  kappa.trials = std::move(trials);
  return kappa;
}

}  // namespace kvasir::compress
