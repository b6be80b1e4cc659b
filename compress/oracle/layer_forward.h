// One decoder layer under its plan, as pure functions of its tensors: the
// oracle of what an engine must compute. Differentiable in every tensor.
// Threads: all functions may run in several threads at once, if shared hooks
//   allow it.
// Errors: errors of the plan's codecs (FakeQuant), with layer and side. May
//   throw c10::Error, which callers catch where they enter libtorch
//   (CatchTorch).
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "compress/oracle/evicting_attention.h"
#include "compress/oracle/fake_quant.h"
#include "compress/oracle/layer_program.h"
#include "compress/oracle/rotation.h"
#include "compress/tensors/tensor_map.h"
#include "model/shapes/decoder_spec.h"
#include "plan/plan.h"

namespace kvasir::compress {

// Observes the steps of a layer. All tensors are part of the autograd graph and
// must not be changed. The calls of one layer come in this order.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Input of the q, k and v projections, after the norm: [B, T, M].
  virtual void OnAttentionInput(int64_t /*layer*/, const at::Tensor& /*x*/) {}
  // Queries and keys [B, T, H, D] before and after their rotation, and values,
  // as rebuilt from what the plan stores. The rotation is by the positions of
  // the tokens, even if the positions of slots roll. Queries are not reported
  // if q_proj is folded, keys before their rotation not if they are stored
  // after it, and keys or values not if their lift is folded away.
  virtual void OnQuery(int64_t /*layer*/, const at::Tensor& /*query*/) {}
  virtual void OnKey(int64_t /*layer*/, const at::Tensor& /*key*/) {}
  virtual void OnRotatedKey(int64_t /*layer*/, const at::Tensor& /*key*/) {}
  virtual void OnValue(int64_t /*layer*/, const at::Tensor& /*value*/) {}
  // All latents of a part side by side, [B, T, sum of R'], as they are coded:
  // after basis and rotation, before HADAMARD_ONLINE.
  virtual void OnLatent(int64_t /*layer*/, plan::Side /*side*/, int /*part*/,
                        const at::Tensor& /*latent*/) {}
  // Returns whether OnCodes is to be called. Codes cost memory.
  virtual bool WantsCodes() const { return false; }
  virtual void OnCodes(int64_t /*layer*/, plan::Side /*side*/, int /*part*/,
                       int64_t /*latent*/, const CodedLatent& /*coded*/) {}
  // The positions that a unit keeps after `length` tokens, as
  // EvictionInputs::on_kept.
  virtual void OnKept(int64_t /*layer*/, int64_t /*batch*/, int64_t /*unit*/,
                      int64_t /*length*/,
                      const std::vector<int64_t>& /*positions*/) {}
};

// Number of codes in ranges that were fixed before, and of those that were
// clamped.
struct ClampCount {
  std::atomic<int64_t> codes{0};
  std::atomic<int64_t> clamped{0};
};

// Replaces a cache that no plan expresses: returns keys and values as they
// would come back from that cache. All tensors are [B, T, H, D].
class CacheTransform {
 public:
  struct Seen {
    at::Tensor values;
    // Tokens nearest to the query (including its own) that it sees as they were
    // before the transform; 0: none.
    int64_t exact_window = 0;
    // Codes in ranges that were fixed before, and those that were clamped.
    int64_t codes = 0;
    int64_t clamped = 0;
  };
  virtual ~CacheTransform() = default;
  // Transforms keys before their rotation. Every query sees the same result.
  virtual absl::StatusOr<Seen> Key(int64_t /*layer*/,
                                   const at::Tensor& key) const {
    return Seen{key, 0};
  }
  // `query` is rotated, without the softmax scale.
  virtual absl::StatusOr<Seen> RotatedKey(int64_t /*layer*/,
                                          const at::Tensor& key,
                                          const at::Tensor& /*query*/) const {
    return Seen{key, 0};
  }
  virtual absl::StatusOr<Seen> Value(int64_t /*layer*/,
                                     const at::Tensor& value) const {
    return Seen{value, 0};
  }
};

// Rules per layer that replace the plan's eviction. Layers without a rule keep
// all tokens.
using EvictionRules = std::vector<std::optional<EvictionRule>>;

struct LayerHooks {
  LayerObserver* observer = nullptr;
  // Null: the plan's eviction, with all tokens of a sequence as its prompt.
  const EvictionRules* eviction = nullptr;
  // Only for uncompressed models.
  const CacheTransform* transform = nullptr;
  // If false, latents are not coded, as if every codec were exact.
  bool code_latents = true;
  // If true, the attention ends when the observer has seen all latents, and
  // returns an undefined tensor.
  bool only_latents = false;
  // Receives the number of codes of CHANNEL_STATIC and of a transform.
  ClampCount* clamp_count = nullptr;
};

// Computes hidden [B, T, M] from the layer's input [B, T, M], at positions 0 ..
// T - 1. `rotation` has at least T positions.
absl::StatusOr<at::Tensor> LayerForward(const LayerProgram& program,
                                        const TensorMap& tensors,
                                        const Rotation& rotation,
                                        const at::Tensor& hidden,
                                        const LayerHooks& hooks = {});

// Only the attention: takes x [B, T, M] after the norm and returns what is
// added to hidden.
absl::StatusOr<at::Tensor> AttentionForward(const LayerProgram& program,
                                            const TensorMap& tensors,
                                            const Rotation& rotation,
                                            const at::Tensor& x,
                                            const LayerHooks& hooks = {});

// The norm before attention: takes hidden [B, T, M] and returns x for
// AttentionForward.
absl::StatusOr<at::Tensor> AttentionInput(const LayerProgram& program,
                                          const TensorMap& tensors,
                                          const at::Tensor& hidden);

// Takes ids [B, T] int64 at positions 0 .. T - 1 and returns [B, T, M].
at::Tensor EmbedTokens(const OuterTensors& outer, const at::Tensor& ids);
// The norm after the last layer.
at::Tensor FinalNorm(const model::DecoderSpec& spec, const OuterTensors& outer,
                     const at::Tensor& hidden);
// Takes [B, T, M] and returns [B, T, V].
at::Tensor FinalLogits(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& hidden);

}  // namespace kvasir::compress
