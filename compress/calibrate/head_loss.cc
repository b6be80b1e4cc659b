#include "compress/calibrate/head_loss.h"

#include <algorithm>
#include <cstdint>

namespace kvasir::compress {
namespace {

// Logits that are held at a time, and rows of the head.
constexpr int64_t kLogits = int64_t{1} << 25;
constexpr int64_t kHeadRows = 8192;
constexpr int64_t kLeastRows = 64;

int64_t RowsAtATime(int64_t vocab) {
  return std::max(kLogits / vocab, kLeastRows);
}

}  // namespace

HeadLoss NextTokenLoss(const at::Tensor& normal, const at::Tensor& head,
                       const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  const int64_t predictions = normal.size(0) - 1;
  const int64_t vocab = head.size(0);
  const int64_t rows_at_a_time = RowsAtATime(vocab);
  HeadLoss result;
  result.gradient = at::zeros_like(normal);
  for (int64_t begin = 0; begin < predictions; begin += rows_at_a_time) {
    const int64_t end = std::min(begin + rows_at_a_time, predictions);
    const at::Tensor rows = normal.slice(0, begin, end);
    const at::Tensor targets = ids.slice(0, begin + 1, end + 1).unsqueeze(1);
    at::Tensor logits = at::empty({end - begin, vocab}, normal.options());
    for (int64_t v = 0; v < vocab; v += kHeadRows) {
      const at::Tensor block = head.slice(0, v, v + kHeadRows);
      logits.slice(1, v, v + kHeadRows)
          .copy_(at::mm(rows, block.to(at::kFloat).t()));
    }
    at::Tensor log_chance = at::log_softmax(logits, 1);
    logits = at::Tensor();
    const at::Tensor chosen = log_chance.gather(1, targets);
    result.loss -= chosen.sum(at::kDouble).item<double>();
    // d(mean of -log p[target]) / d(logits) = (p - 1[target]) / predictions
    at::Tensor slope = log_chance.exp_();
    slope.scatter_add_(1, targets, at::full_like(chosen, -1.0));
    slope.div_(static_cast<double>(predictions));
    at::Tensor gradient = result.gradient.slice(0, begin, end);
    for (int64_t v = 0; v < vocab; v += kHeadRows) {
      gradient.addmm_(slope.slice(1, v, v + kHeadRows),
                      head.slice(0, v, v + kHeadRows).to(at::kFloat));
    }
  }
  result.loss /= static_cast<double>(predictions);
  return result;
}

int64_t HeadLossBytes(int64_t tokens, int64_t vocab, int64_t width) {
  const int64_t rows = std::min(RowsAtATime(vocab), tokens);
  const int64_t head_rows = std::min(kHeadRows, vocab);
  // Logits and their softmax; a block of the head, of the logits, and copies of
  // both for the product; the gradient and what is added to it.
  const int64_t numbers =
      2 * rows * vocab + 2 * head_rows * (width + rows) + 2 * tokens * width;
  return numbers * static_cast<int64_t>(sizeof(float));
}

}  // namespace kvasir::compress
