// The sums of a calibration, layer by layer, and their format on disk.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/artifact/tensor_file.h"
#include "compress/calibrate/calibration.h"
#include "compress/calibrate/calibration_sample.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::compress {

// The parts of a calibration beside input Grams and query energies.
struct CalibrationParts {
  bool fisher = true;
  bool rotated_keys = false;
  // Information of keys and values, and sample rows.
  bool information = false;
  // Labels that are drawn at each position. Each needs a backward pass of its
  // own.
  int64_t labels_per_position = 1;
  // The most rows of each layer.
  int64_t sample_rows = 4096;

  // True if the whole model must be in memory and sequences go through it and
  // back.
  bool has_gradients() const { return fisher || information; }
  bool Includes(const CalibrationParts& other) const {
    return (fisher || !other.fisher) && (rotated_keys || !other.rotated_keys) &&
           (!other.information ||
            (information && labels_per_position == other.labels_per_position &&
             sample_rows == other.sample_rows));
  }
};

// Sums of one layer over the sequences so far. A tensor that is not collected
// is undefined.
struct LayerSums {
  at::Tensor input_gram;     // [M, M] float64, blocks on and above the diagonal
  at::Tensor input_sum;      // [M] float64
  at::Tensor query_squares;  // [Hq, D] float64
  // Squared gradients of each weight. There are as many as weights, so they are
  // float32; all terms are positive, so the sum keeps its precision.
  at::Tensor key_squares;       // [Hkv * D, M]
  at::Tensor value_squares;     // [Hkv * D, M]
  at::Tensor rotated_key_gram;  // [Hkv * D, Hkv * D] float64, as input_gram
  at::Tensor rotated_key_sum;   // [Hkv * D] float64
  // Sums of g gT over all draws: [Hkv * D, Hkv * D] float64, and for each
  // domain [domains, Hkv * D, Hkv * D] float32.
  at::Tensor key_information;
  at::Tensor value_information;
  at::Tensor domain_key_information;
  at::Tensor domain_value_information;
  // [N_s, 2 * Hkv * D] float32; zeros for sequences that are still to come.
  at::Tensor sample_rows;
};

LayerSums ZeroSums(const model::DecoderSpec& spec,
                   const CalibrationSample& sample,
                   const CalibrationParts& parts);
// Bytes of the sums of all layers.
int64_t SumBytes(const model::DecoderSpec& spec,
                 const CalibrationSample& sample,
                 const CalibrationParts& parts);

// Adds rowsT * rows to the blocks of `gram` on and above its diagonal. `rows`
// is [n, M] of any floating type, on the same device. Products and sums are
// float64 and the same for any number of threads.
void AddGram(const at::Tensor& rows, int threads, at::Tensor& gram);

// The sums of g gT over the tokens and draws of one sequence in one layer, each
// [Hkv * D, Hkv * D] float64.
struct SequenceInformation {
  at::Tensor key;
  at::Tensor value;
};
void AddInformation(const SequenceInformation& information, int64_t domain,
                    LayerSums& sums);

// A calibration in progress.
struct CalibrationState {
  std::vector<LayerSums> layers;
  // Sum of the loss over the sequences' next tokens; only with gradients.
  double loss_sum = 0.0;
  // Progress: the number of sequences of `layer` that are done. With gradients
  // all layers of a sequence are done together and `layer` stays 0.
  int64_t layer = 0;
  int64_t sequence = 0;
  // Only without gradients, [N, T, M] float32: the layer's inputs, or the next
  // layer's inputs for sequences that are done.
  at::Tensor hidden;
};

// Moves the layers' sums to a device. Hidden states stay on the CPU.
void MoveSums(at::Device device, CalibrationState& state);

// The file's tensors are on the CPU, wherever the sums are.
TensorFile StateToFile(const CalibrationState& state, const std::string& id);
// DataLoss if the file does not hold this state.
absl::StatusOr<CalibrationState> StateFromFile(const TensorFile& file,
                                               const std::string& id,
                                               const model::DecoderSpec& spec,
                                               const CalibrationSample& sample,
                                               const CalibrationParts& parts);

// Turns finished sums into means and scores. InvalidArgument, naming the layer,
// for sums that are not finite.
absl::StatusOr<Calibration> FinishCalibration(CalibrationState state,
                                              const std::string& id,
                                              const CalibrationSample& sample,
                                              const CalibrationParts& parts);

TensorFile CalibrationToFile(const Calibration& calibration);
// `sample` and `parts` must be those that `id` was made of, because the file
// does not say which rows were sampled.
absl::StatusOr<Calibration> CalibrationFromFile(const TensorFile& file,
                                                const std::string& id,
                                                const CalibrationSample& sample,
                                                const CalibrationParts& parts);

}  // namespace kvasir::compress
