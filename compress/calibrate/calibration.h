// The statistics of a model's attention layers on a text. Plans are made and
// applied with these statistics and the weights.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

namespace kvasir::compress {

// Information about one domain of the calibration text, in one layer.
struct DomainInformation {
  std::string name;
  int64_t tokens = 0;            // tokens of this domain in the sums
  at::Tensor key_information;    // [Hkv * D, Hkv * D] float32, mean of g gT
  at::Tensor value_information;  // [Hkv * D, Hkv * D] float32
};

// Statistics of one layer over the counted calibration tokens (see
// CalibrationSample), on the CPU, float64. x is the input of the q, k and v
// projections (after the norm) in the uncompressed model.
// The moments of values, and of keys before their rotation, follow from these
// statistics and the weights. Let k = W x + b and N = Calibration::num_tokens.
// The mean of k is W input_sum / N + b. Its covariance is W C WT with C =
// input_gram / N - (input_sum / N) (input_sum / N)T. A bias changes only the
// mean. The moments of one domain are estimated from its sample rows.
struct LayerCalibration {
  at::Tensor input_gram;    // [M, M], sum of x xT
  at::Tensor input_sum;     // [M]
  at::Tensor query_energy;  // [Hq, D], mean of q^2 before its rotation

  // Empirical Fisher information of the true next-token loss, one score per row
  // of the key and value projections. For each of the row's M weights, the
  // gradient of a sequence's mean loss is squared and averaged over sequences.
  // The score is the sum of these M averages. A `_root` score is the sum of the
  // square roots of the averages, as in Palu's public code. Undefined if the
  // calibration was made without Fisher information.
  at::Tensor key_fisher;         // [Hkv * D]
  at::Tensor value_fisher;       // [Hkv * D]
  at::Tensor key_fisher_root;    // [Hkv * D]
  at::Tensor value_fisher_root;  // [Hkv * D]

  // Sums of k kT and of k over the tokens, for keys k after their rotation.
  // Undefined unless requested.
  at::Tensor rotated_key_gram;  // [Hkv * D, Hkv * D]
  at::Tensor rotated_key_sum;   // [Hkv * D]

  // Fisher information F of a token's key (before its rotation, with its bias)
  // or value. F is the mean over tokens of g gT. Here g is the gradient of log
  // p(y), summed over the sequence's positions, with respect to this key or
  // value. Each label y is drawn from the model's own distribution p. Let all
  // keys or values have errors e that are independent between tokens. To second
  // order, they cost tr(F E[e eT]) / 2 nats of KL divergence per token.
  // Undefined unless requested.
  at::Tensor key_information;    // [Hkv * D, Hkv * D]
  at::Tensor value_information;  // [Hkv * D, Hkv * D]
  // The information of each domain. Its mean over domains, weighted by their
  // tokens, gives key_information and value_information.
  std::vector<DomainInformation> domains;

  // One row for each sampled token: its key before the rotation, followed by
  // its value. The tokens are spread evenly over domains, sequences and
  // positions. The rows are for calculations that need more than the mean and
  // the second moments. Defined if key_information is defined.
  at::Tensor sample_rows;       // [N_s, 2 * Hkv * D] float32
  at::Tensor sample_positions;  // [N_s] int64, position in the sequence
  at::Tensor sample_domains;    // [N_s] int64, index in `domains`
  // [N_s] bool: true for rows of held-out sequences, which no sum above
  // includes.
  at::Tensor sample_held_out;
};

struct Calibration {
  // Hash of the model, the sampled tokens and the options.
  std::string id;
  // Number of tokens and sequences that are counted in the sums.
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
