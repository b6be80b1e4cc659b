#include "compress/train/crop_sampler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/philox.h"

namespace kvasir::compress {
namespace {

// Returns a random number in [0, limit), by multiply and shift. The bias is
// below 2^-20 if the limit is below 2^43.
int64_t Below(int64_t limit, base::PhiloxCounter bits) {
  const uint64_t wide = (uint64_t{bits[1]} << 32) | bits[0];
  return static_cast<int64_t>(static_cast<uint64_t>(
      (static_cast<unsigned __int128>(wide) * static_cast<uint64_t>(limit)) >>
      64));
}

}  // namespace

CropSampler::CropSampler(int64_t num_tokens, int64_t crop_tokens, uint64_t seed)
    : num_tokens_(num_tokens), crop_tokens_(crop_tokens), seed_(seed) {
  KVASIR_CHECK(crop_tokens >= 1 && num_tokens >= crop_tokens);
  // One window fewer than the stream can hold, because the first window begins
  // at a random token.
  windows_per_epoch_ = std::max<int64_t>(num_tokens / crop_tokens - 1, 1);
}

void CropSampler::StartEpoch(int64_t epoch) {
  epoch_ = epoch;
  const base::PhiloxKey key = base::PhiloxKeyFromSeed(seed_);
  auto draw = [&](int64_t index, int64_t limit) {
    // Each crop length has a random stream of its own.
    const uint64_t high = (static_cast<uint64_t>(epoch) << 24) |
                          static_cast<uint64_t>(crop_tokens_);
    return Below(
        limit, base::Philox4x32(key, base::PhiloxCounterOf(
                                         static_cast<uint64_t>(index), high)));
  };
  const int64_t slack = num_tokens_ - windows_per_epoch_ * crop_tokens_;
  const int64_t phase = draw(0, slack + 1);
  begins_.resize(static_cast<size_t>(windows_per_epoch_));
  for (int64_t i = 0; i < windows_per_epoch_; ++i) {
    begins_[static_cast<size_t>(i)] = phase + i * crop_tokens_;
  }
  for (int64_t i = windows_per_epoch_ - 1; i > 0; --i) {
    std::swap(begins_[static_cast<size_t>(i)],
              begins_[static_cast<size_t>(draw(i, i + 1))]);
  }
}

int64_t CropSampler::CropBegin(int64_t index) {
  const int64_t epoch = index / windows_per_epoch_;
  if (epoch != epoch_) StartEpoch(epoch);
  return begins_[static_cast<size_t>(index % windows_per_epoch_)];
}

}  // namespace kvasir::compress
