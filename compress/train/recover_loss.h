// What recovery minimizes: cross entropy of the text's next token, and the
// divergence of the student's predictions from the teacher's.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace kvasir::compress {

struct RecoverLossWeights {
  double cross_entropy = 1.0;
  // Times temperature^2, which keeps its gradient of one size.
  double divergence = 1.0;
  double temperature = 2.0;
};

// A decoder's states behind its final norm [N, M], and its head [V, M].
struct Prediction {
  at::Tensor normal;
  at::Tensor head;
};

struct RecoverLoss {
  // Sums over the N positions, nats.
  double cross_entropy = 0.0;
  double divergence = 0.0;  // KL(teacher || student) at the temperature
  // Of the weighted sum of both, by the student's normal [N, M]; undefined
  // when nothing has a weight.
  at::Tensor gradient;
};

// targets [N] int64. The teacher is not read (its tensors may be undefined)
// when the divergence has no weight.
// Memory: logits of some rows at a time, never of all. Records no graph.
// Throws c10::Error.
RecoverLoss ComputeRecoverLoss(const Prediction& student,
                               const Prediction& teacher,
                               const at::Tensor& targets,
                               const RecoverLossWeights& weights);

// Rows of logits that are held at a time for a vocabulary of this size.
int64_t RecoverLossRows(int64_t vocab_size);

// Logits-sized buffers that ComputeRecoverLoss holds at its peak.
inline constexpr int64_t kRecoverLossBuffers = 6;

}  // namespace kvasir::compress
