#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <functional>
#include <vector>

namespace kvasir::compress {

struct HeadLoss {
  double loss = 0.0;    // mean over the predictions, nats
  at::Tensor gradient;  // of the mean loss, as `normal`
};

// Cross entropy of the next token and its gradient: normal [T, M], what the
// head is multiplied with; head [V, M] of any floating type; ids [T] int64.
// Row t predicts ids[t + 1]; the last row predicts nothing. T >= 2.
// Memory: the logits of some rows and a few rows of the head in float32, never
// the whole head.
HeadLoss NextTokenLoss(const at::Tensor& normal, const at::Tensor& head,
                       const at::Tensor& ids);

struct LabelScores {
  double loss = 0.0;  // as NextTokenLoss has it
  // Per draw, of the sum over all T rows of log p(label), as `normal`.
  std::vector<at::Tensor> gradients;
};

// Labels that the model itself draws: at row t and draw d the first one whose
// cumulated chance is above uniform(t, d) in [0, 1). Other arguments and memory
// as NextTokenLoss.
LabelScores SampledLabelScores(
    const at::Tensor& normal, const at::Tensor& head, const at::Tensor& ids,
    int64_t draws, const std::function<double(int64_t, int64_t)>& uniform);

// At most what either takes beside its arguments, for T tokens.
int64_t HeadLossBytes(int64_t tokens, int64_t vocab, int64_t width,
                      int64_t draws = 0);

}  // namespace kvasir::compress
