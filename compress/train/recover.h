// Recovery of what compression lost: adapters on the attention projections of
// a compressed model are trained on a text and on the uncompressed model's
// predictions, and merged. Plan, names and shapes stay as they are.
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
  int64_t micro_batch_tokens = 512;  // per thread; bounds the memory
  int64_t crop_tokens = 256;
  double learning_rate = 1e-3;
  double warmup = 0.05;               // fraction of the run
  double final_learning_rate = 0.02;  // fraction of the peak
  double weight_decay = 0.0;
  double clip_norm = 1.0;
  AdapterOptions adapters;  // with the seed of everything
  RecoverLossWeights loss;
  // Trains through the codes of the latents, whose gradients pass straight
  // through; otherwise latents are exact.
  bool through_codes = false;
  // What stands before a text, in every second crop and in every window.
  std::optional<int32_t> start_token;
  int threads = 1;
};

struct RecoverProgress {
  int64_t step = 0;  // done
  // Of this step's batch, nats per token.
  double cross_entropy = 0.0;
  double divergence = 0.0;
  double learning_rate = 0.0;
  double tokens_per_second = 0.0;
};

struct Recovered {
  // Per layer the weights that had an adapter, float32 on the CPU
  // (docs/artifact.md).
  std::vector<TensorMap> layers;
  int64_t trained_parameters = 0;
  int64_t steps = 0;
  int64_t tokens_seen = 0;
  absl::Duration elapsed;
  // Of the first and the last batch; 0 without a step.
  double first_loss = 0.0;
  double last_loss = 0.0;
};

// InvalidArgument with what differs, when the two are not of one shape.
absl::Status CheckTeacher(const model::DecoderSpec& student,
                          const model::DecoderSpec& teacher);

// Works on the models' device, which is one. The same result in every run with
// this number of threads on the CPU. `on_step` stops the run by returning
// false.
// Errors: InvalidArgument for options, or a text, that do not fit; Cancelled
//   when stopped; Internal when the loss leaves the finite numbers.
absl::StatusOr<Recovered> Recover(
    const ReferenceDecoder& student, const ReferenceDecoder& teacher,
    const TokenStream& text, const RecoverOptions& options,
    const std::function<bool(const RecoverProgress&)>& on_step);

// What a run takes in memory, roughly: 4 bytes a number.
struct RecoverMemory {
  int64_t weights_bytes = 0;   // of both models
  int64_t training_bytes = 0;  // gradients, activations, logits, all threads
};
RecoverMemory EstimateRecoverMemory(const model::DecoderSpec& spec,
                                    const RecoverOptions& options);

}  // namespace kvasir::compress
