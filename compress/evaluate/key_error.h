// How well a cache keeps keys, apart from what that does to the loss: the error
// of every layer's keys at the inputs that the uncompressed model gives it.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/oracle/reference_decoder.h"

namespace kvasir::compress {

struct KeyError {
  // Root of the mean over layers of |k' - k|^2 / |k - mean|^2, the mean being
  // that of each channel before the rotation.
  double relative = 0.0;
  // The same by SVDq's error analysis (its section 4.3): a channel of variance
  // v in b bits errs by v / 4^b, truncated ones by v. For keys in a principal
  // basis and for keys coded channel by channel.
  std::optional<double> predicted;
};

// Holds what the teacher computes on a few windows of a text.
// Owns: its inputs and keys, layers * tokens * (hidden + key width) numbers.
// Threads: const methods from any thread.
class KeyErrorMeter {
 public:
  // ids: token ids [T] of each window. The teacher outlives the call only.
  static absl::StatusOr<KeyErrorMeter> Create(
      const ReferenceDecoder& teacher, const std::vector<at::Tensor>& windows);

  // The decoder's spec is the teacher's. Nothing where its keys cannot be seen:
  // a lift that is folded away.
  absl::StatusOr<std::optional<KeyError>> Measure(
      const ReferenceDecoder& decoder) const;

 private:
  struct Layer {
    std::vector<at::Tensor> inputs;        // per window [1, T, M]
    std::vector<at::Tensor> rotated_keys;  // per window [1, T, Hkv, D]
    double centred_energy = 0.0;           // of all windows, rotated
    at::Tensor variances;          // [W], falling: of the principal channels
    at::Tensor rotated_variances;  // the same of rotated keys
  };

  std::vector<Layer> layers_;
};

}  // namespace kvasir::compress
