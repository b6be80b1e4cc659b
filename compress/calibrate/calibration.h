// What a text tells about a model's attention layers: everything planners and
// appliers need beside the weights.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvasir::compress {

// Of one domain of the calibration text, in one layer.
struct DomainInformation {
  std::string name;
  int64_t tokens = 0;            // in the sum
  at::Tensor key_information;    // [Hkv * D, Hkv * D] float32, mean of g gT
  at::Tensor value_information;  // [Hkv * D, Hkv * D] float32
};

// Statistics of one layer over the counted calibration tokens (see
// CalibrationSample), on the CPU, float64. x is the input of the q, k and v
// projections (after the norm) in the uncompressed model.
//
// Moments of keys before their rotation and of values follow from the weights:
// with k = W x + b and N = Calibration::num_tokens, the mean of k is
// W input_sum / N + b and its covariance W C WT with
// C = input_gram / N - (input_sum / N) (input_sum / N)T. A bias moves the mean
// alone. Those of one domain are estimated from its sample rows.
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

  // Fisher information of a token's key before its rotation (with its bias),
  // and of its value: mean over tokens of g gT, where g is the gradient, by
  // that key, of the sum over the sequence's positions of log p(y), with y
  // drawn from the model's own p. To second order an error e of all keys or
  // values, independent between tokens, costs tr(F E[e eT]) / 2 nats of KL a
  // token. Undefined unless asked for.
  at::Tensor key_information;    // [Hkv * D, Hkv * D]
  at::Tensor value_information;  // [Hkv * D, Hkv * D]
  // The same of each domain: their mean, weighted by tokens, is the above.
  std::vector<DomainInformation> domains;

  // Keys before their rotation beside values, of tokens that are spread evenly
  // over domains, sequences and positions; for what depends on more than two
  // moments. Defined with the information.
  at::Tensor sample_rows;       // [N_s, 2 * Hkv * D] float32
  at::Tensor sample_positions;  // [N_s] int64, in the sequence
  at::Tensor sample_domains;    // [N_s] int64, index in `domains`
  // [N_s] bool; true: of a sequence that no sum above has seen.
  at::Tensor sample_held_out;
};

struct Calibration {
  // Hash of model, text, tokens taken and options.
  std::string id;
  // Counted ones.
  int64_t num_tokens = 0;
  int64_t num_sequences = 0;
  std::vector<LayerCalibration> layers;

  bool has_fisher() const {
    return !layers.empty() && layers[0].key_fisher.defined();
  }
  bool has_information() const {
    return !layers.empty() && layers[0].key_information.defined();
  }
};

}  // namespace kvasir::compress
