// Computes one decoder layer under its plan. The functions depend only on their
// arguments and are differentiable in every tensor. They define what an engine
// must compute.
// Threads: any number of threads may call the functions at once, if the hooks
//   that they share allow it.
// Errors: those of CodeLatent, with layer and side. The functions may throw
//   c10::Error, which callers catch with CatchTorch.
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
// must not be changed. The order of calls in a layer is: OnAttentionInput;
// OnQuery; for keys OnLatent and OnCodes of each part, OnKey, OnRotatedKey; for
// values OnLatent and OnCodes of each part that is not joint, OnValue; OnKept.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Input of the q, k and v projections, after the norm: [B, T, M].
  virtual void OnAttentionInput(int64_t /*layer*/, const at::Tensor& /*x*/) {}
  // Queries, keys and values [B, T, H, D] as rebuilt from what the plan stores.
  // They are rotated for the positions of their tokens, even if the plan has
  // rolling positions (EvictionInputs::move). Not reported: queries if q_proj
  // is folded, keys before their rotation if they are stored after it, and keys
  // or values whose lift is folded into q_proj or o_proj.
  virtual void OnQuery(int64_t /*layer*/, const at::Tensor& /*query*/) {}
  virtual void OnKey(int64_t /*layer*/, const at::Tensor& /*key*/) {}
  virtual void OnRotatedKey(int64_t /*layer*/, const at::Tensor& /*key*/) {}
  virtual void OnValue(int64_t /*layer*/, const at::Tensor& /*value*/) {}
  // All latents of a part side by side, [B, T, sum of R'], after the basis and,
  // if they are stored POST_ROPE, after RoPE. HADAMARD_ONLINE comes later.
  virtual void OnLatent(int64_t /*layer*/, plan::Side /*side*/, int /*part*/,
                        const at::Tensor& /*latent*/) {}
  // Returns whether OnCodes is to be called. By default it is not, because
  // codes cost memory.
  virtual bool WantsCodes() const { return false; }
  virtual void OnCodes(int64_t /*layer*/, plan::Side /*side*/, int /*part*/,
                       int64_t /*latent*/, const CodedLatent& /*coded*/) {}
  // Receives the positions that a unit keeps after `length` tokens, as
  // EvictionInputs::on_kept does.
  virtual void OnKept(int64_t /*layer*/, int64_t /*batch*/, int64_t /*unit*/,
                      int64_t /*length*/,
                      const std::vector<int64_t>& /*positions*/) {}
};

// The number of codes in static ranges, and how many of them were clamped.
struct ClampCount {
  std::atomic<int64_t> codes{0};
  std::atomic<int64_t> clamped{0};
};

// Imitates a cache that no plan can express: returns keys and values as they
// would be read back from that cache. All tensors are [B, T, H, D].
class CacheTransform {
 public:
  struct Seen {
    at::Tensor values;
    // Number of tokens nearest to the query (including its own) that the query
    // sees as they were before the transform; 0: none.
    int64_t exact_window = 0;
    // Number of codes in static ranges, and how many of them were clamped.
    int64_t codes = 0;
    int64_t clamped = 0;
  };
  virtual ~CacheTransform() = default;
  // Transforms keys before their rotation. All queries see the same result, so
  // its exact_window must be 0.
  virtual absl::StatusOr<Seen> Key(int64_t /*layer*/,
                                   const at::Tensor& key) const {
    return Seen{key, 0};
  }
  // Transforms keys after their rotation. `query` is rotated, but not
  // multiplied by the softmax scale.
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
  // Null: the plan's eviction, with the whole sequence as the prompt.
  const EvictionRules* eviction = nullptr;
  // May be set only for uncompressed models.
  const CacheTransform* transform = nullptr;
  // If false, latents are not coded: attention sees them unchanged.
  bool code_latents = true;
  // If true, AttentionForward stops when the observer has seen all latents, and
  // returns an undefined tensor.
  bool only_latents = false;
  // Counts the codes of CHANNEL_STATIC and of a transform; may be null.
  ClampCount* clamp_count = nullptr;
};

// Computes hidden [B, T, M] from the layer's input [B, T, M], at positions 0 ..
// T - 1. `rotation` has at least T positions.
absl::StatusOr<at::Tensor> LayerForward(const LayerProgram& program,
                                        const TensorMap& tensors,
                                        const Rotation& rotation,
                                        const at::Tensor& hidden,
                                        const LayerHooks& hooks = {});

// Computes only the attention: takes x [B, T, M] after the norm and returns
// what is added to the hidden states.
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

}  // namespace kvasir::compress
