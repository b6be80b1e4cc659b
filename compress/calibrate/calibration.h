// What a text tells about a model's attention layers: everything planners and
// appliers need beside the weights.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvasir::compress {

// Statistics of one layer over all calibration tokens, on the CPU, float64. x
// is the input of the q, k and v projections (after the norm) in the
// uncompressed model.
struct LayerCalibration {
  at::Tensor input_gram;    // [M, M], sum of x xT
  at::Tensor input_sum;     // [M]
  at::Tensor query_energy;  // [Hq, D], mean of q^2 before its rotation

  // Empirical Fisher information of the true next-token loss, per row of the
  // key and value projections: gradients g of one sequence's mean loss,
  // squared, averaged over sequences, then summed over the row's M weights;
  // `root`: the square root is taken before that sum (Palu's public score).
  // Undefined when the calibration was made without Fisher.
  at::Tensor key_fisher;         // [Hkv * D]
  at::Tensor value_fisher;       // [Hkv * D]
  at::Tensor key_fisher_root;    // [Hkv * D]
  at::Tensor value_fisher_root;  // [Hkv * D]

  // Of keys after their rotation; undefined unless asked for.
  at::Tensor rotated_key_gram;  // [Hkv * D, Hkv * D]
  at::Tensor rotated_key_sum;   // [Hkv * D]
};

struct Calibration {
  // Hash of model, text, tokens taken and options.
  std::string id;
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  std::vector<LayerCalibration> layers;

  bool has_fisher() const {
    return !layers.empty() && layers[0].key_fisher.defined();
  }
};

}  // namespace kvasir::compress
