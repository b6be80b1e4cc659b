// The sums that a calibration collects for each layer, and their format on
// disk.
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

// The optional parts of a calibration. Input Grams and query energies are
// always collected.
struct CalibrationParts {
  bool fisher = true;
  bool rotated_keys = false;
  // If true, two things are collected: the Fisher information of keys and
  // values, and sample rows.
  bool information = false;
  // Number of labels that are drawn at each position. Each label needs its own
  // backward pass.
  int64_t labels_per_position = 1;
  // The largest number of sample rows of each layer.
  int64_t sample_rows = 4096;

  // True if a part needs gradients: the whole model must then be in memory, and
  // sequences go through it forward and backward.
  bool has_gradients() const { return fisher || information; }
  bool Includes(const CalibrationParts& other) const {
    return (fisher || !other.fisher) && (rotated_keys || !other.rotated_keys) &&
           (!other.information ||
            (information && labels_per_position == other.labels_per_position &&
             sample_rows == other.sample_rows));
  }
};

// Sums of one layer over the sequences processed so far. A tensor that is not
// collected is undefined.
struct LayerSums {
  // [M, M] float64. Only the blocks on and above the diagonal are filled.
  at::Tensor input_gram;
  at::Tensor input_sum;      // [M] float64
  at::Tensor query_squares;  // [Hq, D] float64
  // The sum of squared gradients of each weight. It is as large as the weights
  // and therefore float32, which is precise enough because all terms are
  // positive.
  at::Tensor key_squares;       // [Hkv * D, M]
  at::Tensor value_squares;     // [Hkv * D, M]
  at::Tensor rotated_key_gram;  // [Hkv * D, Hkv * D] float64, upper blocks
  at::Tensor rotated_key_sum;   // [Hkv * D] float64
  // Sums of g gT over all draws: [Hkv * D, Hkv * D] float64 for all domains
  // together, and [domains, Hkv * D, Hkv * D] float32 for each domain.
  // LayerCalibration::key_information explains g.
  at::Tensor key_information;
  at::Tensor value_information;
  at::Tensor domain_key_information;
  at::Tensor domain_value_information;
  // [N_s, 2 * Hkv * D] float32. Rows of sequences that were not processed yet
  // are zeros.
  at::Tensor sample_rows;
};

LayerSums ZeroSums(const model::DecoderSpec& spec,
                   const CalibrationSample& sample,
                   const CalibrationParts& parts);
// Returns the number of bytes that the sums of all layers take.
int64_t SumBytes(const model::DecoderSpec& spec,
                 const CalibrationSample& sample,
                 const CalibrationParts& parts);

// Adds rowsT * rows to the blocks of `gram` on and above its diagonal. `rows`
// is [n, M], of any floating-point type, and on the device of `gram`. Products
// and sums are float64. The result is the same for any number of threads.
void AddGram(const at::Tensor& rows, int threads, at::Tensor& gram);

// The sums of g gT (see LayerCalibration::key_information) over the tokens and
// draws of one sequence in one layer. Each is [Hkv * D, Hkv * D] float64.
struct SequenceInformation {
  at::Tensor key;
  at::Tensor value;
};
void AddInformation(const SequenceInformation& information, int64_t domain,
                    LayerSums& sums);

// The state of a calibration in progress.
struct CalibrationState {
  std::vector<LayerSums> layers;
  // Sum of the next-token losses of the sequences that are done; 0 if no
  // gradients are computed.
  double loss_sum = 0.0;
  // Progress: the layer that is being computed, and the number of sequences
  // that it has already processed. With gradients, each sequence passes through
  // all layers at once, so `layer` stays 0.
  int64_t layer = 0;
  int64_t sequence = 0;
  // Hidden states [N, T, M] float32, used only without gradients: the output of
  // `layer` for sequences that it has already processed, and its input for all
  // others.
  at::Tensor hidden;
};

// Moves the layers' sums to a device. Hidden states stay on the CPU.
void MoveSums(at::Device device, CalibrationState& state);

// Converts the state to a file. The file's tensors are on the CPU, even if the
// sums are on another device.
TensorFile StateToFile(const CalibrationState& state, const std::string& id);
// Reads a state back. DataLoss if the file does not hold the state of the
// calibration `id`.
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
// Reads a calibration back. `sample` and `parts` must be those that IdOf hashed
// into `id`: the sampled rows are determined from them, because the file does
// not list these rows.
absl::StatusOr<Calibration> CalibrationFromFile(const TensorFile& file,
                                                const std::string& id,
                                                const CalibrationSample& sample,
                                                const CalibrationParts& parts);

}  // namespace kvasir::compress
