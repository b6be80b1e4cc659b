// Loads codes as vectors of float32. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_CODES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_CODES_INL_H_
#undef KVASIR_KERNELS_CODES_INL_H_
#else
#define KVASIR_KERNELS_CODES_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// Converts 8-bit codes to float32.
HWY_INLINE Vec LoadFloats(const uint8_t* from) {
  const hn::Rebind<uint8_t, Floats> d8;
  const hn::RebindToSigned<Floats> d32;
  return hn::ConvertTo(kFloats, hn::PromoteTo(d32, hn::LoadU(d8, from)));
}

// Looks up the levels that codes of up to 4 bits stand for. If vectors have at
// least 8 lanes, the table is in registers.
class LevelTable {
 public:
  // `levels` has 16 numbers.
  explicit LevelTable(const float* levels) : levels_(levels) {}

  // Returns the level of the code in the lowest 4 bits of each word.
  HWY_INLINE Vec At(WordVec word) const {
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kVecLanes >= 8) {
      const hn::RebindToSigned<Floats> d32;
      const auto lane = hn::IndicesFromVec(
          kFloats, hn::And(word, hn::Set(kWords, uint32_t{kVecLanes - 1})));
      const Vec found = hn::TableLookupLanes(LoadFloats(levels_), lane);
      if constexpr (kVecLanes > 8) return found;
      // Bit 3 of the code, moved to the sign bit, selects between the two
      // halves of the table.
      const Vec high = hn::TableLookupLanes(LoadFloats(levels_ + 8), lane);
      const auto sign = hn::BitCast(d32, hn::ShiftLeft<28>(word));
      return hn::IfThenElse(
          hn::RebindMask(kFloats, hn::Lt(sign, hn::Zero(d32))), high, found);
    }
#endif
    HWY_ALIGN uint32_t codes[kVecLanes];
    HWY_ALIGN float found[kVecLanes];
    hn::Store(word, kWords, codes);
    for (int i = 0; i < kVecLanes; ++i) found[i] = levels_[codes[i] & 15];
    return hn::Load(kFloats, found);
  }

 private:
  const float* levels_;
};

// Replaces codes by their levels. `count` is rounded up to whole vectors.
inline void LookUpLevels(const float* levels, int64_t count, float* codes) {
  const LevelTable table(levels);
  const hn::RebindToSigned<Floats> d32;
  for (int64_t i = 0; i < count; i += kVecLanes) {
    const auto code = hn::ConvertTo(d32, LoadFloats(codes + i));
    hn::StoreU(table.At(hn::BitCast(kWords, code)), kFloats, codes + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_CODES_INL_H_
