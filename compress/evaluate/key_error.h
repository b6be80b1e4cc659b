// Measures the error with which a cache stores keys, independently of the
// effect on the loss. For each layer, keys are computed from the inputs that
// the layer has in the uncompressed model.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

struct KeyError {
  // The square root of the mean over layers of |k' - k|^2 / |k - mean|^2. Here
  // k are the teacher's keys, k' the keys from the cache, and `mean` is the
  // mean of each channel before the rotation.
  double relative = 0.0;
  // `relative` as section 4.3 of the SVDq paper predicts it, from squared
  // errors of v / 4^b for a channel with variance v and b bits, and v for a
  // channel that is not stored. Set for keys in a principal basis and for keys
  // that are coded channel by channel.
  std::optional<double> predicted;
};

// Holds what the teacher computes on a few windows of a text.
// Owns: the teacher's layer inputs and keys, layers * tokens * (hidden + key
//   width) numbers.
// Threads: const methods may be called from any thread.
class KeyErrorMeter {
 public:
  // `windows` holds the token ids [T] of each window. The teacher is not used
  // after the call.
  static absl::StatusOr<KeyErrorMeter> Create(
      const ReferenceDecoder& teacher, const std::vector<at::Tensor>& windows);

  // Measures the error of the decoder's keys. The decoder must have the
  // teacher's spec. Returns nullopt if the decoder computes attention from
  // latents, without keys.
  absl::StatusOr<std::optional<KeyError>> Measure(
      const ReferenceDecoder& decoder) const;

 private:
  struct Layer {
    std::vector<at::Tensor> inputs;  // one tensor [1, T, M] per window
    // one tensor [1, T, Hkv, D] per window
    std::vector<at::Tensor> rotated_keys;
    // Sum of |k - mean|^2 over all windows, including the factor by which YaRN
    // scales rotated keys.
    double centred_energy = 0.0;
    at::Tensor variances;  // [W], variances of the principal channels, falling
    at::Tensor rotated_variances;  // like `variances`, for rotated keys
  };

  std::vector<Layer> layers_;
};

}  // namespace kvasir::compress
