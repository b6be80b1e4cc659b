// The loss that a recovery minimizes: the cross entropy of the text's next
// token, and the divergence of the student's predictions from the teacher's.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace kvasir::compress {

struct RecoverLossWeights {
  double cross_entropy = 1.0;
  // This weight is multiplied by temperature^2, so that the size of the
  // gradient does not depend on the temperature.
  double divergence = 1.0;
  double temperature = 2.0;
};

// The inputs of a decoder's predictions: its states after the final
// norm, [N, M], and its head, [V, M].
struct Prediction {
  at::Tensor normal;
  at::Tensor head;
};

struct RecoverLoss {
  // Sums over the N positions, in nats.
  double cross_entropy = 0.0;
  double divergence = 0.0;  // KL(teacher || student) at the temperature
  // Gradient of the weighted sum of both losses with respect to the student's
  // `normal`, [N, M]; undefined if both weights are 0.
  at::Tensor gradient;
};

// Computes both losses and their gradient. `targets` is [N] int64. If the
// weight of the divergence is 0, the teacher is not read and its tensors may be
// undefined. Records no autograd graph. Throws c10::Error. Holds the logits of
// only RecoverLossRows rows at a time.
RecoverLoss ComputeRecoverLoss(const Prediction& student,
                               const Prediction& teacher,
                               const at::Tensor& targets,
                               const RecoverLossWeights& weights);

// The number of rows in a block of logits. Only the logits of one block are in
// memory at a time.
int64_t RecoverLossRows(int64_t vocab_size);

// ComputeRecoverLoss has at most this many buffers at the same time, each as
// large as a block of logits.
inline constexpr int64_t kRecoverLossBuffers = 6;

}  // namespace kvasir::compress
