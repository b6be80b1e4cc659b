// The parts of a decoder that no plan changes: norms, activations, embedding
// and output head. The functions depend only on their arguments and are
// differentiable in every tensor. They may throw c10::Error, which callers
// catch with CatchTorch. Threads: any number.
#pragma once

#include <ATen/ATen.h>

#include "compress/tensors/tensor_map.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// Applies the model's norm to the last dimension of x, in float32. Only
// LayerNorm uses `bias`.
at::Tensor Normalize(const model::DecoderSpec& spec, const at::Tensor& x,
                     const at::Tensor& weight, const at::Tensor& bias);

// The hidden layer of the MLP. `gate` is used only by an MLP with a gate.
at::Tensor Activate(model::MlpKind kind, const at::Tensor& up,
                    const at::Tensor& gate);

// Returns the embeddings [B, T, M] of ids [B, T] int64 at positions 0 .. T - 1.
at::Tensor EmbedTokens(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& ids);
// Applies the norm that follows the last layer.
at::Tensor FinalNorm(const model::DecoderSpec& spec, const OuterTensors& outer,
                     const at::Tensor& hidden);
// Applies the final norm and the output head to hidden states [B, T, M];
// returns logits [B, T, V].
at::Tensor FinalLogits(const model::DecoderSpec& spec,
                       const OuterTensors& outer, const at::Tensor& hidden);

}  // namespace kvasir::compress
