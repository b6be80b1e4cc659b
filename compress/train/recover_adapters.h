// LoRA adapters on a decoder's attention projections, and their merge into the
// projections' weights.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "compress/oracle/layer_program.h"
#include "compress/oracle/reference_decoder.h"
#include "compress/tensors/tensor_map.h"

namespace kvasir::compress {

struct AdapterOptions {
  int64_t rank = 16;
  double alpha = 32.0;    // an adapter adds alpha / rank * B A
  double dropout = 0.05;  // of A's inputs
  uint64_t seed = 1;
};

// The weights that get an adapter: those that make queries, keys and values
// (for a compressed side, those that make its latents) and the one that takes
// attention's output. They are the same for every method, so that methods can
// be compared. Lifts and bases, which a full-rank model does not have, stay as
// they are.
std::vector<std::string> AdaptedWeights(const LayerProgram& program);

// Owns: A and B (float32, requiring gradients). The weights belong to the
//   decoder, which must outlive the set.
// Threads: const methods from any thread.
// Errors: throws c10::Error.
class AdapterSet {
 public:
  // A is random and B is zero, so nothing changes before the first step.
  AdapterSet(const ReferenceDecoder& decoder, const AdapterOptions& options);

  // All of a layer's tensors as part of the autograd graph, with adapters added
  // to the adapted ones. With dropout, the dropped inputs of A depend only on
  // seed, `draw` and adapter; they are dropped for all tokens of one call.
  TensorMap AdaptLayer(int64_t layer, uint64_t draw) const;

  // The adapted weights of a layer with their adapters merged, in the same
  // names and shapes. They are not part of a graph.
  TensorMap MergeLayer(int64_t layer) const;

  // A and B of every adapter, in a fixed order.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t num_parameters() const;

 private:
  struct Adapter {
    std::string name;   // after "model.layers.{l}."
    at::Tensor weight;  // [out, in]
    at::Tensor a;       // [r, in]
    at::Tensor b;       // [out, r]
    double scale = 0.0;
    uint64_t index = 0;  // over all layers
  };

  at::Tensor KeptInputs(const Adapter& adapter, uint64_t draw) const;

  const ReferenceDecoder& decoder_;
  AdapterOptions options_;
  std::vector<std::vector<Adapter>> layers_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace kvasir::compress
