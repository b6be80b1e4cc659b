#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <vector>

#include "compress/named_tensor.h"
#include "model/shapes.h"

namespace kvasir::compress {

// A Llama decoder for training: RMSNorm, rotate-half RoPE, grouped-query
// attention, gated SiLU MLP.
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
  struct Layer {
    torch::Tensor input_norm;  // [M]
    torch::Tensor query;       // [Hq * D, M]
    torch::Tensor key;         // [Hkv * D, M]
    torch::Tensor value;       // [Hkv * D, M]
    torch::Tensor output;      // [M, Hq * D]
    torch::Tensor post_norm;   // [M]
    torch::Tensor gate;        // [I, M]
    torch::Tensor up;          // [I, M]
    torch::Tensor down;        // [M, I]
  };
  struct Rotation {
    torch::Tensor cos;  // [T, 1, D / 2]
    torch::Tensor sin;
  };

  torch::Tensor Normalize(const torch::Tensor& hidden,
                          const torch::Tensor& weight) const;
  torch::Tensor Attend(const Layer& layer, const torch::Tensor& hidden,
                       int64_t batch, int64_t length) const;
  Rotation RotationOf(int64_t length) const;

  model::ModelShape shape_;
  torch::Device device_;
  torch::Tensor embedding_;  // [V, M]
  std::vector<Layer> layers_;
  torch::Tensor final_norm_;  // [M]
  torch::Tensor head_;        // [V, M]; the embedding when tied
  // [max_position, D / 2]
  torch::Tensor cos_;
  torch::Tensor sin_;
};

}  // namespace kvasir::compress
