#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "compress/oracle/layer_forward.h"
#include "compress/oracle/layer_program.h"
#include "compress/oracle/tensor_map.h"
#include "compress/train/named_tensor.h"
#include "model/shapes/decoder_spec.h"
#include "model/shapes/shapes.h"

namespace kvasir::compress {

// A Llama decoder for training: random weights under the reference decoder's
// forward pass.
// Owns: its parameters (float32, requiring gradients).
// Threads: Forward may run in several threads at once.
// Errors: throws c10::Error; callers catch it where libtorch is entered.
class Decoder {
 public:
  // Random initial weights, a function of `seed` alone. `shape` is valid, of
  // the Llama family, without biases and RoPE scaling.
  Decoder(const model::ModelShape& shape, uint64_t seed, torch::Device device);

  // ids [B, T] on the decoder's device; logits [B * T, V].
  torch::Tensor Forward(const torch::Tensor& ids) const;

  // In a fixed order. A tied head is listed once, as the embedding.
  std::vector<NamedTensor> parameters() const;
  const model::ModelShape& shape() const { return shape_; }
  torch::Device device() const { return device_; }

 private:
  model::ModelShape shape_;
  torch::Device device_;
  model::DecoderSpec spec_;
  torch::Tensor embedding_;  // [V, M]
  std::vector<TensorMap> layers_;
  std::vector<LayerProgram> programs_;
  torch::Tensor final_norm_;  // [M]
  torch::Tensor head_;        // [V, M]; the embedding when tied
  Rotation rotation_;         // of all positions
};

}  // namespace kvasir::compress
