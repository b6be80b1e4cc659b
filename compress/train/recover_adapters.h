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
  double dropout = 0.05;  // fraction of A's inputs that is dropped
  uint64_t seed = 1;
};

// Returns the names of the weights that get an adapter: the projections that
// compute queries, keys and values (or their latents), and the output
// projection. They are the same for every compression method, so that methods
// can be compared.
std::vector<std::string> AdaptedWeights(const LayerProgram& program);

// The adapters of all layers.
// Owns: A and B (float32, requiring gradients). The weights belong to the
//   decoder, which must outlive the set.
// Threads: const methods may be called from any thread.
// Errors: throws c10::Error.
class AdapterSet {
 public:
  // A is random and B is zero, so nothing changes before the first step.
  AdapterSet(const ReferenceDecoder& decoder, const AdapterOptions& options);

  // Returns all tensors of a layer as part of the autograd graph, with the
  // adapters added to the adapted weights. Dropout sets some inputs of A to 0:
  // the same inputs for all tokens of a call, chosen by the seed, `draw` and
  // the adapter.
  TensorMap AdaptLayer(int64_t layer, uint64_t draw) const;

  // Returns the adapted weights of a layer, with their adapters merged into
  // them. Names and shapes stay the same. The results are not part of an
  // autograd graph.
  TensorMap MergeLayer(int64_t layer) const;

  // A and B of every adapter, in a fixed order.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t num_parameters() const;

 private:
  struct Adapter {
    std::string name;   // the weight's name without "model.layers.{l}."
    at::Tensor weight;  // [out, in]
    at::Tensor a;       // [r, in]
    at::Tensor b;       // [out, r]
    double scale = 0.0;
    uint64_t index = 0;  // index of the adapter among those of all layers
  };

  at::Tensor KeptInputs(const Adapter& adapter, uint64_t draw) const;

  const ReferenceDecoder& decoder_;
  AdapterOptions options_;
  std::vector<std::vector<Adapter>> layers_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace kvasir::compress
