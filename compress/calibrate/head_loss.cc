#include "compress/calibrate/head_loss.h"

#include <algorithm>
#include <cstdint>

namespace kvasir::compress {
namespace {

// At most kLogits logits and kHeadRows float32 rows of the head are in memory
// at a time. If the vocabulary is very large, kLogits is exceeded, so that at
// least kLeastRows tokens are computed together.
constexpr int64_t kLogits = int64_t{1} << 25;
constexpr int64_t kHeadRows = 8192;
constexpr int64_t kLeastRows = 64;

int64_t RowsAtATime(int64_t vocab) {
  return std::max(kLogits / vocab, kLeastRows);
}

// Returns the logits [n, V], the product of rows [n, M] and the transposed
// head.
at::Tensor Logits(const at::Tensor& rows, const at::Tensor& head) {
  const int64_t vocab = head.size(0);
  at::Tensor logits = at::empty({rows.size(0), vocab}, rows.options());
  for (int64_t v = 0; v < vocab; v += kHeadRows) {
    const at::Tensor block = head.slice(0, v, v + kHeadRows);
    logits.slice(1, v, v + kHeadRows)
        .copy_(at::mm(rows, block.to(at::kFloat).t()));
  }
  return logits;
}

// Adds the product of slope [n, V] and the head to gradient [n, M].
void AddHeadProduct(const at::Tensor& slope, const at::Tensor& head,
                    at::Tensor& gradient) {
  for (int64_t v = 0; v < head.size(0); v += kHeadRows) {
    gradient.addmm_(slope.slice(1, v, v + kHeadRows),
                    head.slice(0, v, v + kHeadRows).to(at::kFloat));
  }
}

// Returns the first label whose cumulative probability is above `uniform`.
// Rounded probabilities do not sum to exactly 1: if the sum stays below
// `uniform`, the last label with a probability above 0 is returned.
int64_t DrawnLabel(const float* chance, int64_t count, double uniform) {
  double sum = 0.0;
  int64_t last = 0;
  for (int64_t v = 0; v < count; ++v) {
    if (chance[v] > 0.0F) last = v;
    sum += static_cast<double>(chance[v]);
    if (sum > uniform) return v;
  }
  return last;
}

}  // namespace

HeadLoss NextTokenLoss(const at::Tensor& normal, const at::Tensor& head,
                       const at::Tensor& ids) {
  const at::NoGradGuard no_grad;
  const int64_t predictions = normal.size(0) - 1;
  const int64_t rows_at_a_time = RowsAtATime(head.size(0));
  HeadLoss result;
  result.gradient = at::zeros_like(normal);
  for (int64_t begin = 0; begin < predictions; begin += rows_at_a_time) {
    const int64_t end = std::min(begin + rows_at_a_time, predictions);
    const at::Tensor rows = normal.slice(0, begin, end);
    const at::Tensor targets = ids.slice(0, begin + 1, end + 1).unsqueeze(1);
    at::Tensor log_chance = at::log_softmax(Logits(rows, head), 1);
    const at::Tensor chosen = log_chance.gather(1, targets);
    result.loss -= chosen.sum(at::kDouble).item<double>();
    // The gradient of the mean loss with respect to the logits is (p - q) /
    // predictions. p are the predicted probabilities; q is 1 for the target and
    // 0 elsewhere.
    at::Tensor slope = log_chance.exp_();
    slope.scatter_add_(1, targets, at::full_like(chosen, -1.0));
    slope.div_(static_cast<double>(predictions));
    at::Tensor gradient = result.gradient.slice(0, begin, end);
    AddHeadProduct(slope, head, gradient);
  }
  result.loss /= static_cast<double>(predictions);
  return result;
}

LabelScores SampledLabelScores(
    const at::Tensor& normal, const at::Tensor& head, const at::Tensor& ids,
    int64_t draws, const std::function<double(int64_t, int64_t)>& uniform) {
  const at::NoGradGuard no_grad;
  const int64_t tokens = normal.size(0);
  const int64_t vocab = head.size(0);
  const int64_t rows_at_a_time = RowsAtATime(vocab);
  LabelScores result;
  // The gradient of log p[label] with respect to `normal` is head[label] minus
  // the sum over v of p[v] head[v]. `mean` has these sums.
  at::Tensor mean = at::zeros_like(normal);
  std::vector<std::vector<int64_t>> labels(static_cast<size_t>(draws));
  for (int64_t begin = 0; begin < tokens; begin += rows_at_a_time) {
    const int64_t end = std::min(begin + rows_at_a_time, tokens);
    // The operations are in place, because each of these tensors takes a large
    // part of the memory.
    at::Tensor chance = Logits(normal.slice(0, begin, end), head);
    chance.sub_(chance.amax(1, /*keepdim=*/true));
    const int64_t predictions = std::min(end, tokens - 1) - begin;
    const at::Tensor chosen =
        chance.slice(0, 0, predictions)
            .gather(
                1,
                ids.slice(0, begin + 1, begin + 1 + predictions).unsqueeze(1));
    const at::Tensor total = chance.exp_().sum(1, /*keepdim=*/true);
    result.loss -= (chosen - total.slice(0, 0, predictions).log())
                       .sum(at::kDouble)
                       .item<double>();
    chance.div_(total);
    at::Tensor rows_mean = mean.slice(0, begin, end);
    AddHeadProduct(chance, head, rows_mean);
    const at::Tensor here = chance.cpu().contiguous();
    for (int64_t t = begin; t < end; ++t) {
      const float* row = here.data_ptr<float>() + (t - begin) * vocab;
      for (int64_t d = 0; d < draws; ++d) {
        labels[static_cast<size_t>(d)].push_back(
            DrawnLabel(row, vocab, uniform(t, d)));
      }
    }
  }
  result.loss /= static_cast<double>(tokens - 1);
  for (const std::vector<int64_t>& drawn : labels) {
    const at::Tensor index = at::tensor(drawn).to(head.device());
    result.gradients.push_back(
        head.index_select(0, index).to(at::kFloat).sub_(mean));
  }
  return result;
}

int64_t HeadLossBytes(int64_t tokens, int64_t vocab, int64_t width,
                      int64_t draws) {
  const int64_t rows = std::min(RowsAtATime(vocab), tokens);
  const int64_t head_rows = std::min(kHeadRows, vocab);
  // The terms are: the logits and their softmax; a block of the head and a
  // block of logits, each with a copy for the product; the gradients, and one
  // product that is added to them.
  const int64_t numbers = 2 * rows * vocab + 2 * head_rows * (width + rows) +
                          (2 + draws) * tokens * width;
  return numbers * static_cast<int64_t>(sizeof(float));
}

}  // namespace kvasir::compress
