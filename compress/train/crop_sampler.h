#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// Random crops of a token stream; no token repeats before all have been seen.
// Each epoch cuts the stream into windows from a random start and visits them
// in random order. Crop n depends only on seed, length and n.
// Threads: one caller.
class CropSampler {
 public:
  // `num_tokens` >= `crop_tokens`.
  CropSampler(int64_t num_tokens, int64_t crop_tokens, uint64_t seed);

  // First token of crop `index`, counted over all epochs.
  int64_t CropBegin(int64_t index);

 private:
  void StartEpoch(int64_t epoch);

  int64_t num_tokens_;
  int64_t crop_tokens_;
  uint64_t seed_;
  int64_t epoch_ = -1;
  int64_t windows_per_epoch_;
  std::vector<int64_t> begins_;
};

}  // namespace kvasir::compress
