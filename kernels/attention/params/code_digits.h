// Digits: attention multiplies codes as integers. A query or an attention
// weight is written as a float32 unit times an integer of 14 bits, and the
// integer as a high and a low digit of 7 bits. Digits and codes are then bytes,
// which SIMD instructions multiply and add in groups without overflow. (Without
// such instructions, CPUs multiply the whole integers.) Sums of integers are
// exact in any order, so every instruction set, batch and shape of register
// tile gives the same results. C++17.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/latents/code_range.h"
#include "kernels/latents/latent_view.h"

namespace kvasir::kernels {

// The number of neighbouring channels of a run whose query digits share one
// unit. A sum of 128 products is below 2^31.
inline constexpr int64_t kDigitChannels = 128;
inline constexpr int kDigitBits = 7;
// The largest integers for queries, which may be negative, and for weights.
inline constexpr int32_t kMostQueryDigits = 8191;
inline constexpr int32_t kMostWeightDigits = 16383;
// If the magnitudes of all numbers that share a unit are below this limit, the
// numbers become 0.
inline constexpr float kLeastDigits = 0x1p-100f;

// Finds the largest magnitude among the numbers that are passed to it. The
// result is infinity if any of them is not finite.
class DigitRange {
 public:
  void Add(float x) {
    const float size = std::fabs(x);
    if (!(size <= kGreatestFloat)) finite_ = false;
    if (size > largest_) largest_ = size;
  }
  float largest() const {
    return finite_ ? largest_ : std::numeric_limits<float>::infinity();
  }

 private:
  float largest_ = 0.0f;
  bool finite_ = true;
};

// Converts a number x to an integer: integer = Round(x * inverse), so x is
// about unit * integer. The error is at most half a unit. If any number is not
// finite, the unit is NaN, and `inverse` is 0.
struct DigitScale {
  float unit = 0.0f;
  float inverse = 0.0f;  // 0: all integers are 0

  // `largest` is what DigitRange finds; `most` is kMostQueryDigits or
  // kMostWeightDigits.
  static DigitScale Of(float largest, int32_t most) {
    if (!(largest <= kGreatestFloat)) {
      return {std::numeric_limits<float>::quiet_NaN(), 0.0f};
    }
    if (largest < kLeastDigits) return {};
    const auto levels = static_cast<float>(most);
    return {largest / levels, levels / largest};
  }
  int32_t Round(float x) const {
    return inverse == 0.0f ? 0
                           : static_cast<int32_t>(std::nearbyint(x * inverse));
  }
};

// Returns the high digit of a query's integer, in [-64, 64]. The low digit is
// the rest, integer - 128 * high, in [-64, 63].
inline int32_t HighQueryDigit(int32_t integer) {
  return (integer + (1 << (kDigitBits - 1))) >> kDigitBits;
}

// A row's weights for the 64 slots of a block, each multiplied by the scale of
// its slot, as integers. Kernels multiply four slots at a time: q, q + 16,
// q + 32 and q + 48. So a vector of scores becomes a vector of these words
// without moving numbers between lanes.
struct alignas(64) WeightDigits {
  uint32_t even[16];  // the halves of even[q] belong to slots q and q + 32
  uint32_t odd[16];   // and those of odd[q] to slots q + 16 and q + 48
  float unit;
  int32_t sum;  // sum of the integers

  int32_t At(int64_t slot) const {
    const uint32_t* const words = slot / 16 % 2 == 0 ? even : odd;
    return static_cast<int32_t>(words[slot % 16] >> (slot / 32 * 16) & 0xffff);
  }
  // Requires that the slot's integer is 0.
  void Set(int64_t slot, int32_t integer) {
    uint32_t* const words = slot / 16 % 2 == 0 ? even : odd;
    words[slot % 16] |= static_cast<uint32_t>(integer) << (slot / 32 * 16);
  }
};

inline constexpr int64_t kWeightDigitsFloats =
    static_cast<int64_t>(sizeof(WeightDigits) / sizeof(float));

// The levels of a part (the numbers for which its codes stand) as integers:
// level = step * integer, exactly.
struct LevelIntegers {
  float step = 1.0f;
  int8_t integers[kMaxNormLevels] = {};
};
// The largest magnitude of an integer that stands for a level.
inline constexpr int32_t kMostLevelInteger = 127;
// Requires that the part has levels and that CheckLatentPart accepts it, so
// that the largest level is 127 steps.
template <template <typename> class Ptr>
LevelIntegers LevelIntegersOf(const LatentPartIn<Ptr>& part) {
  DigitRange range;
  for (int i = 0; i < part.num_levels; ++i) range.Add(part.levels[i]);
  LevelIntegers levels;
  levels.step = range.largest() / static_cast<float>(kMostLevelInteger);
  for (int i = 0; i < part.num_levels; ++i) {
    levels.integers[i] =
        static_cast<int8_t>(std::nearbyint(part.levels[i] / levels.step));
  }
  return levels;
}

}  // namespace kvasir::kernels
