// Recovers quality that compression lost. Adapters on the attention projections
// of a compressed model are trained on a text and on the uncompressed model's
// predictions for it. Then they are merged into the weights. The plan and the
// names and shapes of tensors do not change.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "compress/calibrate/token_stream.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/tensors/tensor_map.h"
#include "compress/train/recover_adapters.h"
#include "compress/train/recover_loss.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

struct RecoverOptions {
  int64_t steps = 300;
  int64_t batch_tokens = 4096;
  int64_t micro_batch_tokens = 512;  // tokens per thread; limits the memory
  int64_t crop_tokens = 256;
  double learning_rate = 1e-3;
  double warmup = 0.05;               // fraction of the steps
  double final_learning_rate = 0.02;  // fraction of the peak rate
  double weight_decay = 0.0;
  double clip_norm = 1.0;
  // `adapters.seed` is the seed of all random numbers of the run.
  AdapterOptions adapters;
  RecoverLossWeights loss;
  // If true, latents are quantized during training, with straight-through
  // gradients; otherwise they are exact.
  bool through_codes = false;
  // The token that the tokenizer puts before a text. It replaces the first
  // token of every second crop.
  std::optional<int32_t> start_token;
  int threads = 1;
};

struct RecoverProgress {
  int64_t step = 0;  // number of steps done
  // Loss of this step's batch in nats per token.
  double cross_entropy = 0.0;
  double divergence = 0.0;
  double learning_rate = 0.0;
  double tokens_per_second = 0.0;
};

struct Recovered {
  // For each layer, the weights that had an adapter, float32 on the CPU, by
  // their names in the artifact (docs/artifact.md).
  std::vector<TensorMap> layers;
  int64_t trained_parameters = 0;
  int64_t steps = 0;
  int64_t tokens_seen = 0;
  absl::Duration elapsed;
  // Loss of the first and the last batch; 0 if no step was done.
  double first_loss = 0.0;
  double last_loss = 0.0;
};

// Returns InvalidArgument, naming the difference, if the two models do not have
// the same shape.
absl::Status CheckTeacher(const model::DecoderSpec& student,
                          const model::DecoderSpec& teacher);

// Trains adapters on the student and merges them. Both models must be on the
// same device. On the CPU the result is the same in every run with the same
// number of threads. `on_step` stops the run by returning false.
// Errors: InvalidArgument for options out of range or a text that is too short;
//   Cancelled when stopped; Internal if the loss is not finite.
absl::StatusOr<Recovered> Recover(
    const ReferenceDecoder& student, const ReferenceDecoder& teacher,
    const TokenStream& text, const RecoverOptions& options,
    const std::function<bool(const RecoverProgress&)>& on_step);

// Estimates the memory that a run takes, with 4 bytes per number.
struct RecoverMemory {
  int64_t weights_bytes = 0;  // weights of both models
  // gradients, activations and logits of all threads
  int64_t training_bytes = 0;
};
RecoverMemory EstimateRecoverMemory(const model::DecoderSpec& spec,
                                    const RecoverOptions& options);

}  // namespace kvasir::compress
