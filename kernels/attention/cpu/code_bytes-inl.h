// Unpacks codes of cached slots to bytes in vectors, and sums products of such
// bytes. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_CODE_BYTES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_CODE_BYTES_INL_H_
#undef KVASIR_KERNELS_CODE_BYTES_INL_H_
#else
#define KVASIR_KERNELS_CODE_BYTES_INL_H_
#endif

#include <cstdint>
#include <type_traits>

#include "hwy/highway.h"
#include "kernels/attention/params/code_digits.h"
#include "kernels/latents/code_pack.h"
#include "kernels/simd/ahead_lines.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

using Bytes = hn::Repartition<uint8_t, Words>;
using ByteVec = hn::Vec<Bytes>;
inline constexpr Bytes kBytes;
using Halves = hn::Repartition<uint16_t, Words>;
inline constexpr Halves kHalves;
using Ints = hn::RebindToSigned<Words>;
using IntVec = hn::Vec<Ints>;
inline constexpr Ints kInts;

// A vector has this many blocks of 128 bits.
inline constexpr int kBlocks = kVecLanes / 4;

HWY_INLINE ByteVec AsBytes(WordVec words) { return hn::BitCast(kBytes, words); }
HWY_INLINE WordVec AsWords(ByteVec bytes) { return hn::BitCast(kWords, bytes); }
template <typename V>
HWY_INLINE WordVec RightBy(V words, int bits) {
  return bits == 0 ? words : hn::ShiftRightSame(words, bits);
}

// ----- Sums of products of bytes.

// DigitSums computes high * 128 + low for every 32-bit lane. Here `high` and
// `low` are sums of products of an unsigned and a signed byte. Each call of Add
// adds four products to either sum.
#if HWY_TARGET <= HWY_AVX3_DL && HWY_ARCH_X86
// Written in assembly, because Highway 1.0.3 does not have this instruction.
HWY_INLINE IntVec AddQuads(IntVec sum, ByteVec a, ByteVec b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "vm"(b.raw));
  return sum;
}
class DigitSums {
 public:
  HWY_INLINE DigitSums() {}
  HWY_INLINE void Add(ByteVec high_a, ByteVec high_b, ByteVec low_a,
                      ByteVec low_b) {
    high_ = AddQuads(high_, high_a, high_b);
    low_ = AddQuads(low_, low_a, low_b);
  }
  HWY_INLINE IntVec Total() const {
    return hn::Add(hn::ShiftLeft<kDigitBits>(high_), low_);
  }

 private:
  IntVec high_ = hn::Zero(kInts);
  IntVec low_ = hn::Zero(kInts);
};
#else
#if HWY_TARGET <= HWY_AVX3
HWY_INLINE IntVec AddPairs(ByteVec a, ByteVec b, int16_t factor) {
  return IntVec{_mm512_madd_epi16(_mm512_maddubs_epi16(a.raw, b.raw),
                                  _mm512_set1_epi16(factor))};
}
#elif HWY_TARGET == HWY_AVX2
HWY_INLINE IntVec AddPairs(ByteVec a, ByteVec b, int16_t factor) {
  return IntVec{_mm256_madd_epi16(_mm256_maddubs_epi16(a.raw, b.raw),
                                  _mm256_set1_epi16(factor))};
}
#else
// Returns, for each 32-bit lane, the sum of its four products of bytes, times
// `factor`. The sum of two products fits into 16 bits (code_digits.h).
HWY_INLINE IntVec AddPairs(ByteVec a, ByteVec b, int16_t factor) {
  const hn::RebindToSigned<Halves> d16;
  const auto a16 = hn::BitCast(d16, a);
  const auto b16 = hn::BitCast(d16, b);
  const auto even = hn::Mul(hn::And(a16, hn::Set(d16, int16_t{0xff})),
                            hn::ShiftRight<8>(hn::ShiftLeft<8>(b16)));
  const auto odd =
      hn::Mul(hn::BitCast(d16, hn::ShiftRight<8>(hn::BitCast(kHalves, a))),
              hn::ShiftRight<8>(b16));
  const IntVec both = hn::BitCast(kInts, hn::Add(even, odd));
  return hn::Mul(hn::Add(hn::ShiftRight<16>(both),
                         hn::ShiftRight<16>(hn::ShiftLeft<16>(both))),
                 hn::Set(kInts, int32_t{factor}));
}
#endif
class DigitSums {
 public:
  HWY_INLINE DigitSums() {}
  HWY_INLINE void Add(ByteVec high_a, ByteVec high_b, ByteVec low_a,
                      ByteVec low_b) {
    const IntVec high = AddPairs(high_a, high_b, 1 << kDigitBits);
    total_ = hn::Add(total_, hn::Add(high, AddPairs(low_a, low_b, 1)));
  }
  HWY_INLINE IntVec Total() const { return total_; }

 private:
  IntVec total_ = hn::Zero(kInts);
};
#endif

// ----- Codes in bytes.

// How codes are stored: the kLow lowest bits of each code in one plane, and the
// kHigh bits above them (or none) in another plane. kByLevel: a code is an
// index into a table of levels. Otherwise the code itself is multiplied.
template <int kLow, int kHigh, bool kByLevel>
struct CodeKind {
  static constexpr int kLowBits = kLow;
  static constexpr int kHighBits = kHigh;
  static constexpr bool kLevels = kByLevel;
  // The number of codes whose low bits are in one byte of the low plane.
  static constexpr int kPerByte = 8 / kLow;
  // kPerWord: the number of codes in a word of the low plane. kHighPerWord: the
  // number of bits that these codes have in the high plane.
  static constexpr int kPerWord = 32 / kLow;
  static constexpr int kHighPerWord = kPerWord * kHigh;
};

// Calls run(kind), where `kind` is the CodeKind of codes that are stored
// at `place`.
template <typename Run>
void ForKind(const CodePlace& place, bool levels, const Run& run) {
  switch (place.bits()) {
    case 8:
      return run(CodeKind<8, 0, false>());
    case 6:
      return run(CodeKind<4, 2, false>());
    case 5:
      return run(CodeKind<4, 1, false>());
    case 4:
      return levels ? run(CodeKind<4, 0, true>())
                    : run(CodeKind<4, 0, false>());
    case 3:
      return levels ? run(CodeKind<2, 1, true>())
                    : run(CodeKind<2, 1, false>());
    case 2:
      return levels ? run(CodeKind<2, 0, true>())
                    : run(CodeKind<2, 0, false>());
    default:
      return levels ? run(CodeKind<1, 0, true>())
                    : run(CodeKind<1, 0, false>());
  }
}

// Takes the code at place kIndex of each byte of `low`. If the code has high
// bits, they are in the same byte of `high`, already shifted left by kLow. If
// codes have levels, returns table[code] instead of the code.
template <class Kind, int kIndex>
HWY_INLINE ByteVec TakeCodes(WordVec low, WordVec high, ByteVec table) {
  constexpr int kLow = Kind::kLowBits;
  constexpr int kHigh = Kind::kHighBits;
  if constexpr (kIndex > 0) low = hn::ShiftRight<kIndex * kLow>(low);
  if constexpr (kLow < 8) {
    low = hn::And(low, hn::Set(kWords, 0x01010101u * ((1u << kLow) - 1)));
  }
  if constexpr (kHigh > 0) {
    if constexpr (kIndex > 0) high = hn::ShiftRight<kIndex * kHigh>(high);
    constexpr uint32_t kMask = 0x01010101u * (((1u << kHigh) - 1) << kLow);
    low = hn::Or(low, hn::And(high, hn::Set(kWords, kMask)));
  }
  if constexpr (Kind::kLevels) {
    return hn::TableLookupBytes(table, AsBytes(low));
  } else {
    return AsBytes(low);
  }
}

// Returns the table that TakeCodes needs: every 128-bit block has the integers
// of the 16 levels, plus `offset`.
HWY_INLINE ByteVec LevelTable(const int8_t* levels, int offset) {
  HWY_ALIGN uint8_t table[16] = {};
  for (int i = 0; levels != nullptr && i < 16; ++i) {
    table[i] = static_cast<uint8_t>(levels[i] + offset);
  }
  return hn::LoadDup128(kBytes, table);
}

inline constexpr int64_t LinesOf(int64_t bytes) {
  return (bytes + AheadLines::kLineBytes - 1) / AheadLines::kLineBytes;
}

// kDotRows is the most rows of a register tile. kDotSums is its most DigitSums,
// which is rows times vectors. Builds with sanitizers use smaller tiles,
// because larger ones take too long to compile.
inline constexpr int kDotRows = KVASIR_TILE_ROWS < 4 ? 1 : 4;
inline constexpr int kDotSums = KVASIR_TILE_ROWS < 4 ? 1 : 8;

// Divides rows into register tiles of 4, 2 or 1 rows (at most kDotRows), and
// calls run(height, first row) for each tile.
template <typename Run>
HWY_INLINE void ForTiles(int64_t rows, const Run& run) {
  int64_t row = 0;
  if constexpr (kDotRows == 4) {
    for (; row + 4 <= rows; row += 4) {
      run(std::integral_constant<int, 4>(), row);
    }
    if (row + 2 <= rows) {
      run(std::integral_constant<int, 2>(), row);
      row += 2;
    }
  }
  for (; row < rows; ++row) run(std::integral_constant<int, 1>(), row);
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_CODE_BYTES_INL_H_
