// The decoder layers: from token ids to hidden states, through the paged cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/allocator.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/latents/hadamard_tables.h"
#include "model/shapes/decoder_spec.h"
#include "worker/executor/kv_arenas.h"
#include "worker/executor/layer_attention.h"
#include "worker/executor/step_profile.h"
#include "worker/ranks/collective.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// The tokens of one step. Device memory.
struct TokenBatch {
  int64_t num_tokens = 0;               // T
  int64_t num_sequences = 0;            // B
  absl::Span<const SequenceRows> rows;  // AttentionInput's; host memory
  const int32_t* ids = nullptr;         // [T]
  const int64_t* positions = nullptr;   // [T], logical
  absl::Span<const AttentionBatch> groups;
  absl::Span<const int64_t* const> ring_slots;  // [T] each
  int32_t* not_finite = nullptr;                // [T], AttentionInput's
};

// The residual stream after the last layer is x + delta, [T, M] each.
struct HiddenStates {
  float* x = nullptr;
  float* delta = nullptr;
};

// Owns: the RoPE table and the tables of each layer's attention. Spec, weights,
// arenas and collective must outlive it. Threads: one at a time.
class Decoder {
 public:
  struct Parts {
    const model::DecoderSpec* spec = nullptr;
    const ModelWeights* weights = nullptr;
    const KvArenas* arenas = nullptr;
    Collective* collective = nullptr;
    int64_t page_tokens = 0;
    StepProfile* profile = nullptr;    // or null
    int64_t* clamped_codes = nullptr;  // LayerAttention::Parts
  };

  static absl::StatusOr<Decoder> Create(const Parts& parts,
                                        kernels::DeviceAllocator* allocator,
                                        kernels::Stream* stream);

  // Writes the tokens' keys and values into the cache and attends through it.
  // `out` is taken from the workspace, in the caller's scope.
  absl::Status Run(kernels::Stream& stream, const TokenBatch& batch,
                   HiddenStates* out, kernels::Workspace& workspace) const;

  // LayerAttention's.
  LayerAttention::SlotWork WorkOn(
      int64_t layer, absl::Span<const kernels::AttentionSequence> sequences,
      absl::Span<const SequenceRows> rows) const {
    return attention_[static_cast<size_t>(layer)].WorkOn(sequences, rows);
  }

  // out[r] = the final norm of the stream's row rows[r]. [num_rows, M]
  absl::Status FinalNorm(kernels::Stream& stream, const HiddenStates& hidden,
                         const int32_t* rows, int64_t num_rows, float* out,
                         kernels::Workspace& workspace) const;

  const model::DecoderSpec& spec() const { return *parts_.spec; }
  const kernels::PackedMatrix& head() const { return parts_.weights->head; }
  StepProfile* profile() const { return parts_.profile; }

 private:
  // One norm, with the addition before it.
  struct NormRows {
    float* x = nullptr;               // [T, M]
    const float* residual = nullptr;  // [T, M] or null
    const float* weight = nullptr;
    const float* bias = nullptr;  // of a LayerNorm
    float* out = nullptr;
    int64_t num_rows = 0;
  };

  Decoder() = default;
  absl::Status Embed(kernels::Stream& stream, const TokenBatch& batch, float* x,
                     kernels::Workspace& workspace) const;
  absl::Status Attention(kernels::Stream& stream, const TokenBatch& batch,
                         int64_t layer, const float* normed, float* out,
                         kernels::Workspace& workspace) const;
  absl::Status Norm(kernels::Stream& stream, const NormRows& rows,
                    kernels::Workspace& workspace) const;
  // sum += the MLP of `normed` (parallel residual).
  absl::Status AddMlp(kernels::Stream& stream, int64_t num_tokens,
                      int64_t layer, const float* normed, float* sum,
                      kernels::Workspace& workspace) const;
  absl::Status Mlp(kernels::Stream& stream, int64_t num_tokens, int64_t layer,
                   const float* normed, float* out,
                   kernels::Workspace& workspace) const;

  Parts parts_;
  kernels::DeviceBuffer rope_steps_;  // [rotary_dim / 2] uint64
  std::unique_ptr<kernels::HadamardTables> hadamard_;
  std::vector<LayerAttention> attention_;
};

}  // namespace kvasir::worker
