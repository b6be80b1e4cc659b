#pragma once

#include <cstdint>
#include <vector>

namespace kvasir::compress {

// Chooses random crops of a token stream. Each epoch divides the stream, from a
// random token on, into windows of a crop's length, and visits each window
// once, in random order. Crop n depends only on the seed, the lengths of stream
// and crop, and n.
// Threads: one caller.
class CropSampler {
 public:
  // `num_tokens` must be at least `crop_tokens`.
  CropSampler(int64_t num_tokens, int64_t crop_tokens, uint64_t seed);

  // Returns the position of the first token of crop `index`, counted over all
  // epochs.
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
