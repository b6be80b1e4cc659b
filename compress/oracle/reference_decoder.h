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
  // If true, the ranges of CHANNEL_STATIC codecs may be missing. The decoder
  // must then run with LayerHooks::code_latents = false, for example to find
  // these ranges.
  bool without_ranges = false;
};

// A whole model in memory under its plan: the reference that defines what an
// engine must compute. All of its tensors and products are float32.
// Owns: its tensors (which may share memory with the tensors it was made from).
// Threads: const methods may be called from any thread, if the hooks allow it.
// Errors: exceptions of libtorch become Internal.
class ReferenceDecoder {
 public:
  // Loads a model. Without a plan the model is uncompressed and has no codes. A
  // plan must pass plan::ValidatePlan, and the checkpoint must have exactly the
  // tensors that the plan needs.
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
  // [B, T, V] on the decoder's device. Gradients are recorded unless the caller
  // has turned this off (at::NoGradGuard).
  absl::StatusOr<at::Tensor> Logits(const at::Tensor& ids,
                                    const LayerHooks& hooks = {}) const;

  // LastHidden and HeadLogits compute Logits in two steps. LastHidden returns
  // the output of the last layer, [B, T, M].
  absl::StatusOr<at::Tensor> LastHidden(const at::Tensor& ids,
                                        const LayerHooks& hooks = {}) const;
  // Returns the logits [..., V] (float32) of any rows of LastHidden's output.
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
  // Returns a layer's rotation for the positions 0 .. `num_positions` - 1 and
  // possibly more.
  Rotation RotationOf(int64_t num_positions, int64_t layer) const;

 private:
  ReferenceDecoder() = default;

  model::DecoderSpec spec_;
  std::optional<kvasir::v1::KvPlan> plan_;
  DecoderOptions options_;
  OuterTensors outer_;
  std::vector<TensorMap> layers_;
  std::vector<LayerProgram> programs_;
  // The rotation for the longest sequence so far. It is not made for the whole
  // context of the model, which may be far longer.
  struct Turned {
    std::mutex mutex;
    Rotation rotation;
    int64_t positions = 0;
  };
  std::shared_ptr<Turned> turned_ = std::make_shared<Turned>();
};

}  // namespace kvasir::compress
