// One decoder layer under its plan, as pure functions over its tensors: the
// oracle of what an engine must compute, differentiable in every tensor.
//
// Threads: all functions may run in several threads at once; a hook that is
//   shared must allow it.
// Errors: the Status of the plan's codecs (FakeQuant) with layer and side; may
//   throw c10::Error, to be caught where libtorch is entered (CatchTorch).
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

// Sees what a layer computes on its way; all tensors are part of the autograd
// graph and must not be changed. Calls of one layer come in this order.
class LayerObserver {
 public:
  virtual ~LayerObserver() = default;
  // Input of the q, k and v projections, after the norm: [B, T, M].
  virtual void OnAttentionInput(int64_t /*layer*/, const at::Tensor& /*x*/) {}
  // Queries and keys [B, T, H, D] before and after their rotation (by the
  // positions of their tokens, rolling or not), and values: as rebuilt from
  // what the plan stores. Queries not where q_proj is folded, keys before their
  // rotation not where they are stored after it, no key or value whose lift is
  // folded away.
  virtual void OnQuery(int64_t /*layer*/, const at::Tensor& /*query*/) {}
  virtual void OnKey(int64_t /*layer*/, const at::Tensor& /*key*/) {}
  virtual void OnRotatedKey(int64_t /*layer*/, const at::Tensor& /*key*/) {}
  virtual void OnValue(int64_t /*layer*/, const at::Tensor& /*value*/) {}
  // All latents of a part side by side [B, T, sum of R'], as they are coded:
  // after basis and rotation, before HADAMARD_ONLINE.
  virtual void OnLatent(int64_t /*layer*/, plan::Side /*side*/, int /*part*/,
                        const at::Tensor& /*latent*/) {}
  // Whether OnCodes is called; codes cost memory.
  virtual bool WantsCodes() const { return false; }
  virtual void OnCodes(int64_t /*layer*/, plan::Side /*side*/, int /*part*/,
                       int64_t /*latent*/, const CodedLatent& /*coded*/) {}
  // What stays of a unit when `length` tokens of a sequence of the batch have
  // been seen: as EvictionInputs::on_kept.
  virtual void OnKept(int64_t /*layer*/, int64_t /*batch*/, int64_t /*unit*/,
                      int64_t /*length*/,
                      const std::vector<int64_t>& /*positions*/) {}
};

// Codes in ranges fixed before, and how many of them were clamped.
struct ClampCount {
  std::atomic<int64_t> codes{0};
  std::atomic<int64_t> clamped{0};
};

// Stands in for a cache that no plan expresses: gives keys and values back as
// that cache would. All tensors [B, T, H, D].
class CacheTransform {
 public:
  struct Seen {
    at::Tensor values;
    // Tokens nearest to the query (itself included) that it sees as they were
    // before the transform; 0: none.
    int64_t exact_window = 0;
    // Codes in ranges that were fixed before, and those clamped to them.
    int64_t codes = 0;
    int64_t clamped = 0;
  };
  virtual ~CacheTransform() = default;
  // Before the rotation; every query sees the same.
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

// What evicts in a model instead of its plan, or how; by layer. Layers without
// a rule keep all tokens.
using EvictionRules = std::vector<std::optional<EvictionRule>>;

struct LayerHooks {
  LayerObserver* observer = nullptr;
  // Null: as the plan says, all tokens of a sequence being its prompt.
  const EvictionRules* eviction = nullptr;
  // For uncompressed models only.
  const CacheTransform* transform = nullptr;
  // False: latents are not coded, as if every codec were exact (and so
  // exact rows).
  bool code_latents = true;
  // The attention ends where an observer has seen all latents, and gives
  // nothing: an undefined tensor.
  bool only_latents = false;
  // Adds up the codes of CHANNEL_STATIC, and those of a transform.
  ClampCount* clamp_count = nullptr;
};

// hidden [B, T, M] to hidden, at positions 0 .. T - 1 (rotation of at least T
// positions).
absl::StatusOr<at::Tensor> LayerForward(const LayerProgram& program,
                                        const TensorMap& tensors,
                                        const Rotation& rotation,
                                        const at::Tensor& hidden,
                                        const LayerHooks& hooks = {});

// The attention alone: x [B, T, M] after the norm to what is added to hidden.
absl::StatusOr<at::Tensor> AttentionForward(const LayerProgram& program,
                                            const TensorMap& tensors,
                                            const Rotation& rotation,
                                            const at::Tensor& x,
                                            const LayerHooks& hooks = {});

// The norm before attention: hidden [B, T, M] to x of AttentionForward.
absl::StatusOr<at::Tensor> AttentionInput(const LayerProgram& program,
                                          const TensorMap& tensors,
                                          const at::Tensor& hidden);

// ids [B, T] int64 at positions 0 .. T - 1 to [B, T, M].
at::Tensor EmbedTokens(const OuterTensors& outer, const at::Tensor& ids);
// The norm behind the last layer.
at::Tensor FinalNorm(const model::DecoderSpec& spec, const OuterTensors& outer,
                     const at::Tensor& hidden);
// [B, T, M] to [B, T, V].
at::Tensor FinalLogits(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& hidden);

}  // namespace kvasir::compress
