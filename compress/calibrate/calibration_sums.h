// What a calibration adds up, layer by layer, and how that is kept on disk.
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

// What is collected beside input Grams and query energies.
struct CalibrationParts {
  bool fisher = true;
  bool rotated_keys = false;
  // Of keys and values, with sample rows.
  bool information = false;
  // Labels that are drawn at each position; each wants a way back of its own.
  int64_t labels_per_position = 1;
  // At most, of each layer.
  int64_t sample_rows = 4096;

  // The whole model is in memory, and sequences go through it and back.
  bool has_gradients() const { return fisher || information; }
  bool Includes(const CalibrationParts& other) const {
    return (fisher || !other.fisher) && (rotated_keys || !other.rotated_keys) &&
           (!other.information ||
            (information && labels_per_position == other.labels_per_position &&
             sample_rows == other.sample_rows));
  }
};

// Sums of one layer over the sequences seen so far. Undefined: not collected.
struct LayerSums {
  at::Tensor input_gram;     // [M, M] float64, blocks on and above the diagonal
  at::Tensor input_sum;      // [M] float64
  at::Tensor query_squares;  // [Hq, D] float64
  // Squared gradients of each weight. Float32: all terms are positive, so the
  // sum keeps its precision, and there are as many as weights.
  at::Tensor key_squares;       // [Hkv * D, M]
  at::Tensor value_squares;     // [Hkv * D, M]
  at::Tensor rotated_key_gram;  // [Hkv * D, Hkv * D] float64, as input_gram
  at::Tensor rotated_key_sum;   // [Hkv * D] float64
  // Of g gT over all draws: [Hkv * D, Hkv * D] float64, and of each domain
  // [domains, Hkv * D, Hkv * D] float32.
  at::Tensor key_information;
  at::Tensor value_information;
  at::Tensor domain_key_information;
  at::Tensor domain_value_information;
  // [N_s, 2 * Hkv * D] float32; zeros where no sequence was yet.
  at::Tensor sample_rows;
};

LayerSums ZeroSums(const model::DecoderSpec& spec,
                   const CalibrationSample& sample,
                   const CalibrationParts& parts);
// Of all layers.
int64_t SumBytes(const model::DecoderSpec& spec,
                 const CalibrationSample& sample,
                 const CalibrationParts& parts);

// Adds rowsT * rows to the blocks of `gram` on and above its diagonal; rows
// [n, M] of any floating type, on the same device. Products and sums are
// float64, the same for any number of threads.
void AddGram(const at::Tensor& rows, int threads, at::Tensor& gram);

// g gT of one sequence's tokens, over all draws, for one layer: [Hkv * D,
// Hkv * D] float64.
struct SequenceInformation {
  at::Tensor key;
  at::Tensor value;
};
void AddInformation(const SequenceInformation& information, int64_t domain,
                    LayerSums& sums);

// A calibration under way.
struct CalibrationState {
  std::vector<LayerSums> layers;
  // Of the sequences' next tokens, summed; with gradients only.
  double loss_sum = 0.0;
  // Where it stands: sequences of `layer` that are done. With gradients all
  // layers of a sequence are done together and `layer` stays 0.
  int64_t layer = 0;
  int64_t sequence = 0;
  // Without gradients, [N, T, M] float32: inputs of the layer, or of the next
  // one for the sequences that are done.
  at::Tensor hidden;
};

// The layers' sums; hidden states stay on the CPU.
void MoveSums(at::Device device, CalibrationState& state);

// On the CPU, wherever the sums are.
TensorFile StateToFile(const CalibrationState& state, const std::string& id);
// DataLoss for a file that is no such state.
absl::StatusOr<CalibrationState> StateFromFile(const TensorFile& file,
                                               const std::string& id,
                                               const model::DecoderSpec& spec,
                                               const CalibrationSample& sample,
                                               const CalibrationParts& parts);

// Means and the like of finished sums. InvalidArgument, naming the layer, for
// sums that are not finite.
absl::StatusOr<Calibration> FinishCalibration(CalibrationState state,
                                              const std::string& id,
                                              const CalibrationSample& sample,
                                              const CalibrationParts& parts);

TensorFile CalibrationToFile(const Calibration& calibration);
// `sample` and `parts` are what `id` is made of: where rows come from is not in
// the file.
absl::StatusOr<Calibration> CalibrationFromFile(const TensorFile& file,
                                                const std::string& id,
                                                const CalibrationSample& sample,
                                                const CalibrationParts& parts);

}  // namespace kvasir::compress
