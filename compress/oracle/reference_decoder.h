#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/layer_program.h"
#include "compress/tensors/tensor_loader.h"
#include "compress/tensors/tensor_map.h"
#include "model/checkpoint/checkpoint.h"
#include "model/shapes/decoder_spec.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

struct DecoderOptions {
  at::Device device = at::kCPU;
  // If true, tensors may lack the ranges of CHANNEL_STATIC codecs. The decoder
  // may then only run with LayerHooks::code_latents off, for example to find
  // these ranges.
  bool without_ranges = false;
};

// A whole model in memory under its plan: the oracle of what is served. All of
// its tensors and products are float32.
// Owns: its tensors (shared with those it was made from).
// Threads: const methods from any thread, if the hooks allow it.
// Errors: as Status; what libtorch throws becomes Internal.
class ReferenceDecoder {
 public:
  // Without a plan the model is uncompressed, without codes. A plan must pass
  // plan::ValidatePlan; the tensors must be exactly those that it needs.
  static absl::StatusOr<ReferenceDecoder> Load(
      const model::Checkpoint& checkpoint,
      const std::optional<kvasir::v1::KvPlan>& plan,
      const DecoderOptions& options = {});

  struct Parts {
    model::DecoderSpec spec;
    std::optional<kvasir::v1::KvPlan> plan;
    OuterTensors outer;
    std::vector<TensorMap> layers;
  };
  static absl::StatusOr<ReferenceDecoder> FromTensors(
      Parts parts, const DecoderOptions& options = {});

  // Takes ids int64 [B, T], T <= max_position_embeddings, and returns float32
  // [B, T, V] on the decoder's device. Gradients are recorded if the caller's
  // mode says so.
  absl::StatusOr<at::Tensor> Logits(const at::Tensor& ids,
                                    const LayerHooks& hooks = {}) const;

  // Logits in two steps: the output of the last layer [B, T, M], and the
  // logits of any of its rows [..., V] (float32).
  absl::StatusOr<at::Tensor> LastHidden(const at::Tensor& ids,
                                        const LayerHooks& hooks = {}) const;
  absl::StatusOr<at::Tensor> HeadLogits(const at::Tensor& hidden) const;

  const model::DecoderSpec& spec() const { return spec_; }
  const std::optional<kvasir::v1::KvPlan>& plan() const { return plan_; }
  at::Device device() const { return options_.device; }
  const OuterTensors& outer() const { return outer_; }
  const TensorMap& layer(int64_t index) const {
    return layers_[static_cast<size_t>(index)];
  }
  const LayerProgram& program(int64_t index) const {
    return programs_[static_cast<size_t>(index)];
  }
  // A rotation with at least the first `num_positions` positions.
  Rotation RotationOf(int64_t num_positions) const;

 private:
  ReferenceDecoder() = default;

  model::DecoderSpec spec_;
  std::optional<kvasir::v1::KvPlan> plan_;
  DecoderOptions options_;
  OuterTensors outer_;
  std::vector<TensorMap> layers_;
  std::vector<LayerProgram> programs_;
  // The rotation of the longest sequence so far. (A model's context may be far
  // longer than any sequence.)
  struct Turned {
    std::mutex mutex;
    Rotation rotation;
    int64_t positions = 0;
  };
  std::shared_ptr<Turned> turned_ = std::make_shared<Turned>();
};

}  // namespace kvasir::compress
