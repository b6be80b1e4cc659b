#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace kvasir::compress {

struct HeadLoss {
  double loss = 0.0;    // mean over all predictions, in nats
  at::Tensor gradient;  // gradient of `loss` with respect to `normal`
};

// The cross entropy of next-token prediction, and its gradient. `normal` [T, M]
// is the input of the head, `head` [V, M] may have any floating-point type, and
// `ids` [T] is int64. Row t predicts ids[t + 1]; the last row predicts nothing.
// T >= 2.
// Memory: logits for a block of rows, and a few rows of the head in float32,
//   but never the whole head.
HeadLoss NextTokenLoss(const at::Tensor& normal, const at::Tensor& head,
                       const at::Tensor& ids);

struct LabelScores {
  double loss = 0.0;  // next-token loss, as in NextTokenLoss
  // For each draw: log p(label) is summed over all T rows, and this is the
  // gradient of the sum with respect to `normal`.
  std::vector<at::Tensor> gradients;
};

// Like NextTokenLoss, but with labels that are drawn from the model's own
// distribution. The label of row t and draw d is the first token whose
// cumulative probability is above uniform(t, d), a number in [0, 1).
LabelScores SampledLabelScores(
    const at::Tensor& normal, const at::Tensor& head, const at::Tensor& ids,
    int64_t draws, const std::function<double(int64_t, int64_t)>& uniform);

// An upper bound of the memory that NextTokenLoss (draws = 0) or
// SampledLabelScores takes in addition to its arguments.
int64_t HeadLossBytes(int64_t tokens, int64_t vocab, int64_t width,
                      int64_t draws = 0);

}  // namespace kvasir::compress
