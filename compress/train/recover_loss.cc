#include "compress/train/recover_loss.h"

#include <algorithm>

namespace kvasir::compress {
namespace {

// Logits are computed in blocks of about kBlockNumbers numbers, which fit into
// a core's cache. But a block has at least kLeastRows rows, because with fewer
// rows reading the head would take most of the time.
constexpr int64_t kBlockNumbers = int64_t{1} << 19;
constexpr int64_t kLeastRows = 64;
constexpr int64_t kMostRows = 1024;

}  // namespace

int64_t RecoverLossRows(int64_t vocab_size) {
  return std::clamp(kBlockNumbers / vocab_size, kLeastRows, kMostRows);
}

RecoverLoss ComputeRecoverLoss(const Prediction& student,
                               const Prediction& teacher,
                               const at::Tensor& targets,
                               const RecoverLossWeights& weights) {
  const at::NoGradGuard no_grad;
  const int64_t positions = student.normal.size(0);
  const int64_t rows = RecoverLossRows(student.head.size(0));
  const double temperature = weights.temperature;
  const at::Tensor student_head = student.head.t();
  RecoverLoss result;
  if (weights.cross_entropy > 0.0 || weights.divergence > 0.0) {
    result.gradient = at::empty_like(student.normal);
  }
  for (int64_t begin = 0; begin < positions; begin += rows) {
    const int64_t end = std::min(begin + rows, positions);
    const at::Tensor logits =
        at::mm(student.normal.slice(0, begin, end), student_head);
    // The gradient of the cross entropy with respect to the logits is p - q,
    // where q is 1 for the target and 0 elsewhere.
    at::Tensor slope = at::log_softmax(logits, 1);
    const at::Tensor chosen = targets.slice(0, begin, end).unsqueeze(1);
    const at::Tensor log_chance = slope.gather(1, chosen);
    result.cross_entropy -= log_chance.sum(at::kDouble).item<double>();
    if (!result.gradient.defined()) continue;
    slope.exp_();
    slope.scatter_add_(1, chosen, at::full_like(log_chance, -1.0));
    slope.mul_(weights.cross_entropy);
    if (weights.divergence > 0.0) {
      // The gradient of T^2 KL with respect to the logits is T (p - q), where p
      // and q are the student's and the teacher's probabilities at the
      // temperature T.
      const at::Tensor log_p = at::log_softmax(logits / temperature, 1);
      const at::Tensor log_q = at::log_softmax(
          at::mm(teacher.normal.slice(0, begin, end), teacher.head.t())
              .div_(temperature),
          1);
      const at::Tensor q = log_q.exp();
      result.divergence +=
          (q * (log_q - log_p)).sum(at::kDouble).item<double>();
      slope.add_(log_p.exp().sub_(q), weights.divergence * temperature);
    }
    at::Tensor gradient = result.gradient.slice(0, begin, end);
    at::mm_out(gradient, slope, student.head);
  }
  return result;
}

}  // namespace kvasir::compress
