// Measures how well a cache keeps keys, apart from the effect on the loss: the
// error of every layer's keys when the layer gets the inputs of the
// uncompressed model.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

struct KeyError {
  // The root of the mean over layers of |k' - k|^2 / |k - mean|^2, where `mean`
  // is that of each channel before the rotation.
  double relative = 0.0;
  // The error that SVDq's analysis predicts (its section 4.3): a channel of
  // variance v with b bits has the error v / 4^b, a truncated one v. Set for
  // keys in a principal basis and for keys that are coded channel by channel.
  std::optional<double> predicted;
};

// Holds what the teacher computes on a few windows of a text.
// Owns: the teacher's layer inputs and keys, layers * tokens * (hidden + key
//   width) numbers.
// Threads: const methods from any thread.
class KeyErrorMeter {
 public:
  // `windows` holds the token ids [T] of each window. The teacher need only
  // outlive the call.
  static absl::StatusOr<KeyErrorMeter> Create(
      const ReferenceDecoder& teacher, const std::vector<at::Tensor>& windows);

  // The decoder must have the teacher's spec. Empty if its keys cannot be
  // observed because a lift is folded away.
  absl::StatusOr<std::optional<KeyError>> Measure(
      const ReferenceDecoder& decoder) const;

 private:
  struct Layer {
    std::vector<at::Tensor> inputs;        // per window [1, T, M]
    std::vector<at::Tensor> rotated_keys;  // per window [1, T, Hkv, D]
    double centred_energy = 0.0;           // of all windows, rotated
    at::Tensor variances;          // [W], falling, of the principal channels
    at::Tensor rotated_variances;  // the same for rotated keys
  };

  std::vector<Layer> layers_;
};

}  // namespace kvasir::compress
