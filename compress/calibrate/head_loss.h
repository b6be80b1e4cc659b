#pragma once

#include <ATen/ATen.h>

#include <cstdint>

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

// At most what that takes beside its arguments, for T tokens.
int64_t HeadLossBytes(int64_t tokens, int64_t vocab, int64_t width);

}  // namespace kvasir::compress
