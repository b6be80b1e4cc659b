// Runs the decoder layers: computes hidden states from token ids and the paged
// cache.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/activations.h"
#include "kernels/device/device.h"
#include "kernels/device/device_tables.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/latents/hadamard_tables.h"
#include "kernels/rowwise/norm.h"
#include "model/shapes/decoder_spec.h"
#include "worker/collective/collective.h"
#include "worker/executor/attention/layer_attention.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/executor/step/step_profile.h"
#include "worker/weights/weights.h"

namespace kvasir::worker {

// The tokens of one step. Pointers are device memory.
struct TokenBatch {
  int64_t num_tokens = 0;                 // T in shapes
  int64_t padded_tokens = 0;              // see AttentionInput::padded_tokens
  int64_t num_sequences = 0;              // B in shapes
  absl::Span<const SequenceRows> rows;    // see AttentionInput::rows
  kernels::DevicePtr<const int32_t> ids;  // [T]
  kernels::DevicePtr<const int64_t> positions;  // [T], positions in the text
  absl::Span<const AttentionBatch> groups;
  // For each KvArenas::Ring, where the exact (uncompressed) row of each token
  // is stored. [T] each.
  absl::Span<const kernels::DevicePtr<const int64_t>> ring_slots;
  // For each token, the number of ranks on which a latent of the token was not
  // finite. The caller sets zeros before Run. [T]
  kernels::DevicePtr<float> not_finite;
};

// The residual stream after the last layer: x + delta. Both are [T, M], in the
// device's type of activations.
struct HiddenStates {
  kernels::DevicePtr<float> x;
  kernels::DevicePtr<float> delta;
};

// Owns: the tables of RoPE angles, memory for exact rows, and the prepared
//   attention of each layer. Spec, weights, arenas and collective must outlive
//   the decoder.
// Threads: one at a time.
class Decoder {
 public:
  struct Parts {
    const model::DecoderSpec* spec = nullptr;
    const ModelWeights* weights = nullptr;
    const KvArenas* arenas = nullptr;
    Collective* collective = nullptr;
    int64_t page_tokens = 0;
    bool prompts_as_rows = false;
    int64_t max_tokens = 0;                    // the most tokens of one step
    const plan::ResolvedPlan* plan = nullptr;  // used only by Create
    MassRoom mass;
    StepProfile* profile = nullptr;  // may be null
    // See LayerAttention::Parts::key_tap and clamped_codes.
    const KeyTap* key_tap = nullptr;
    kernels::DevicePtr<int64_t> clamped_codes;
    // The tokens that each expert has run, summed over layers: [E] counters,
    // which Run increases. Unused if the model has no experts.
    kernels::DevicePtr<int64_t> expert_load;
  };

  // `device` must outlive the decoder.
  static absl::StatusOr<Decoder> Create(const Parts& parts,
                                        kernels::Device* device);

  // Plans on the host how the next Run divides attention into blocks, once for
  // each kind of launch. Returns the errors of kernels::DivideStep.
  absl::Status DivideSteps(absl::Span<const SequenceRows> rows,
                           absl::Span<const AttentionBatch> groups);

  // Runs all layers: writes the tokens' keys and values into the cache and
  // computes attention over the cache. `out` points into the workspace, and is
  // valid as long as the caller's scope of the workspace.
  absl::Status Run(kernels::Stream& stream, const TokenBatch& batch,
                   HiddenStates* out, kernels::Workspace& workspace) const;

  // These two methods call LayerAttention's methods of the same names for
  // layer `layer`.
  absl::Status Evict(kernels::Stream& stream, int64_t layer,
                     const kernels::EvictionRows& rows,
                     const kernels::EvictionStep& step,
                     kernels::Workspace& workspace) const {
    return attention_[static_cast<size_t>(layer)].Evict(stream, rows, step,
                                                        workspace);
  }
  LayerAttention::SlotWork WorkOn(
      int64_t layer, absl::Span<const kernels::AttentionSequence> sequences,
      absl::Span<const SequenceRows> rows) const {
    return attention_[static_cast<size_t>(layer)].WorkOn(sequences, rows);
  }

  // Applies the final norm: out[r] is the norm of row rows[r] of the residual
  // stream. `out` is [num_rows, M].
  absl::Status FinalNorm(kernels::Stream& stream, const HiddenStates& hidden,
                         kernels::DevicePtr<const int32_t> rows,
                         int64_t num_rows, kernels::DevicePtr<float> out,
                         kernels::Workspace& workspace) const;

  // Computes the logits [num_rows, ids.count] of rows after the final norm.
  // `ids` must begin at a multiple of plan::kIdsPerPanel. Every rank gets the
  // logits of all `ids`.
  absl::Status Logits(kernels::Stream& stream,
                      kernels::DevicePtr<const float> normed, int64_t num_rows,
                      const plan::IdRange& ids,
                      kernels::DevicePtr<float> logits,
                      kernels::Workspace& workspace) const;

  // The attention kernels that a GPU uses, each with the number of layers that
  // use it. Empty on a CPU.
  struct LayersKernels {
    kernels::AttentionKernels kernels;
    int64_t layers = 0;
  };
  std::vector<LayersKernels> attention_kernels() const;

  const model::DecoderSpec& spec() const { return *parts_.spec; }
  const MassRoom& mass_room() const { return parts_.mass; }
  const kernels::Activations& activations() const { return activations_; }
  StepProfile* profile() const { return parts_.profile; }

 private:
  // Attention launches that divide their work into the same blocks, so that
  // DivideSteps divides it only once.
  struct StepKind {
    size_t page_group = 0;
    const LayerAttention::Launch* launch = nullptr;  // one launch of this kind
  };

  explicit Decoder(kernels::Device* device);
  absl::Status CreateLayers(kernels::Device* device);
  void FindStepKinds();
  absl::Status Embed(kernels::Stream& stream, const TokenBatch& batch,
                     kernels::DevicePtr<float> x,
                     kernels::Workspace& workspace) const;
  absl::Status Attention(kernels::Stream& stream, const TokenBatch& batch,
                         int64_t layer, kernels::DevicePtr<const float> normed,
                         kernels::DevicePtr<float> out,
                         kernels::Workspace& workspace) const;
  // Applies `norm` after setting the model's width, kind of norm and epsilon.
  absl::Status Norm(kernels::Stream& stream, kernels::NormParams norm,
                    kernels::Workspace& workspace) const;
  // Adds norm.residual, if it is set, to norm.x. Sets `input` to the input of
  // attention or the MLP: norm.out or, in models that do not normalize
  // inputs, norm.x.
  absl::Status Input(kernels::Stream& stream, kernels::NormParams norm,
                     kernels::DevicePtr<const float>* input,
                     kernels::Workspace& workspace) const;
  // If the model normalizes the outputs of attention and MLP, normalizes such
  // an output x in place.
  absl::Status NormOutput(kernels::Stream& stream,
                          kernels::DevicePtr<const float> weight,
                          int64_t num_tokens, kernels::DevicePtr<float> x,
                          kernels::Workspace& workspace) const;
  // Adds the MLP's output for `normed` to `sum`, for models with a parallel
  // residual.
  absl::Status AddMlp(kernels::Stream& stream, const TokenBatch& batch,
                      int64_t layer, kernels::DevicePtr<const float> normed,
                      kernels::DevicePtr<float> sum,
                      kernels::Workspace& workspace) const;
  // Runs the MLP or the experts of a layer, and adds the ranks' results.
  absl::Status Mlp(kernels::Stream& stream, const TokenBatch& batch,
                   int64_t layer, kernels::DevicePtr<const float> normed,
                   kernels::DevicePtr<float> out,
                   kernels::Workspace& workspace) const;
  absl::Status DenseMlp(kernels::Stream& stream, const TokenBatch& batch,
                        const LayerWeights& weights,
                        kernels::DevicePtr<const float> normed,
                        kernels::DevicePtr<float> out,
                        kernels::Workspace& workspace) const;
  absl::Status Experts(kernels::Stream& stream, const TokenBatch& batch,
                       const ExpertWeights& weights,
                       kernels::DevicePtr<const float> normed,
                       kernels::DevicePtr<float> out,
                       kernels::Workspace& workspace) const;

  Parts parts_;
  kernels::Activations activations_;  // the device's type of activations
  // How much the angle of each RoPE pair grows per position, [rotary_dim / 2]
  // uint64. Layers with a sliding window may have a table of their own.
  kernels::DeviceTables tables_;
  // FreshRows::memory, shared by all layers, which run one at a time
  kernels::DeviceBuffer fresh_;
  std::unique_ptr<kernels::HadamardTables> hadamard_;
  std::vector<LayerAttention> attention_;
  std::vector<StepKind> step_kinds_;
  // the divisions that DivideSteps has made for the next Run
  std::vector<kernels::AttentionStep> steps_;
};

}  // namespace kvasir::worker
