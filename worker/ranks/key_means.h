// Measures the mean of each layer's keys before RoPE. Keys of most models have
// a large part that hardly depends on the token. The cache leaves it out of
// quantized keys, as it leaves out biases (kernels/latents/key_bias.h), so that
// codes use their levels for what differs between tokens.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/ranks/text_run.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// Means are measured with at most this many tokens.
inline constexpr int64_t kKeyMeanTokens = 128;

// Returns a hash of the tokens, which identifies how means are measured.
// Workers with the same weights and the same id leave out the same means if
// their arithmetic is the same too (ModelExecutor::numerics_id). Pages are
// exchanged only between such workers.
std::string KeyMeansId(absl::Span<const int32_t> token_ids);

// Whether means can be measured with these tokens. There must be more
// than 4, because the first 4 are skipped, and at most kKeyMeanTokens. All must
// be in the vocabulary.
bool CanMeasureWith(const model::DecoderSpec& spec,
                    absl::Span<const int32_t> token_ids);

// Runs the tokens with a dense cache and sets LayerWeights::key_mean of all
// layers, with numbers rounded to bf16. Returns false and sets nothing if the
// tokens cannot be used (CanMeasureWith), if keys are not finite, or if the
// weights were loaded for a plan with tensors of its own (HaveEqualWeights).
// All ranks of a group must call it with the same tokens; each measures its own
// heads.
// Memory: allocates an executor for one sequence while it runs.
// Errors: those of ServeDensePlan, of RunText and of the collective. After the
//   latter two the weights are lost.
absl::StatusOr<bool> MeasureKeyMeans(const TextRank& rank,
                                     absl::Span<const int32_t> token_ids,
                                     ModelWeights* weights);

}  // namespace kvasir::worker
