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

// True if DigitSums multiplies digits that are bytes (code_digits.h). Otherwise
// it multiplies the whole integers, which have 16 bits.
inline constexpr bool kDigitsAreBytes =
    HWY_TARGET == HWY_SCALAR || (HWY_TARGET <= HWY_AVX3_DL && HWY_ARCH_X86);
inline constexpr int kNumberParts = kDigitsAreBytes ? 1 : 2;

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

// ----- Sums of products.

// Four numbers in each 32-bit lane: as bytes if kDigitsAreBytes. Otherwise as
// two vectors of 16-bit numbers, where parts[0] has the even ones of the four.
struct Numbers {
  ByteVec parts[kNumberParts];
};
inline constexpr int64_t kNumbersBytes = kNumberParts * 4 * kVecLanes;
HWY_INLINE Numbers LoadNumbers(const uint8_t* from) {
  Numbers numbers;
  for (int i = 0; i < kNumberParts; ++i) {
    numbers.parts[i] = hn::LoadU(kBytes, from + i * 4 * kVecLanes);
  }
  return numbers;
}
HWY_INLINE void StoreNumbers(const Numbers& numbers, uint8_t* to) {
  for (int i = 0; i < kNumberParts; ++i) {
    hn::StoreU(numbers.parts[i], kBytes, to + i * 4 * kVecLanes);
  }
}

#if HWY_TARGET <= HWY_AVX3_DL && HWY_ARCH_X86
HWY_INLINE Numbers UnsignedNumbers(ByteVec bytes) { return {{bytes}}; }
HWY_INLINE Numbers SignedNumbers(ByteVec bytes) { return {{bytes}}; }

// Written in assembly, because Highway 1.0.3 does not have this instruction.
HWY_INLINE IntVec AddQuads(IntVec sum, ByteVec a, ByteVec b) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "vm"(b.raw));
  return sum;
}
// The same with the word *b in every lane of the second factor.
HWY_INLINE IntVec AddQuads(IntVec sum, ByteVec a, const uint32_t* b) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "m"(*b));
  return sum;
}
// Computes, for every 32-bit lane, the sum of the products of numbers and
// integers. `high` and `low` are the digits of the integers, as bytes.
class DigitSums {
 public:
  HWY_INLINE DigitSums() {}
  // Numbers are unsigned, digits signed. digits[0] has the high digits of all
  // lanes, digits[1] the low ones.
  HWY_INLINE void AddUnsigned(const Numbers& numbers, const uint32_t* digits) {
    high_ = AddQuads(high_, numbers.parts[0], digits);
    low_ = AddQuads(low_, numbers.parts[0], digits + 1);
  }
  // Numbers are signed, digits unsigned.
  HWY_INLINE void AddSigned(const Numbers& numbers, ByteVec high, ByteVec low) {
    high_ = AddQuads(high_, high, numbers.parts[0]);
    low_ = AddQuads(low_, low, numbers.parts[0]);
  }
  HWY_INLINE IntVec Total() const {
    return hn::Add(hn::ShiftLeft<kDigitBits>(high_), low_);
  }

 private:
  IntVec high_ = hn::Zero(kInts);
  IntVec low_ = hn::Zero(kInts);
};
#else
using ShortInts = hn::RebindToSigned<Halves>;
inline constexpr ShortInts kShortInts;

HWY_INLINE Numbers UnsignedNumbers(ByteVec bytes) {
  const auto halves = hn::BitCast(kHalves, bytes);
  return {{hn::And(bytes, AsBytes(hn::Set(kWords, 0x00ff00ffu))),
           hn::BitCast(kBytes, hn::ShiftRight<8>(halves))}};
}
HWY_INLINE Numbers SignedNumbers(ByteVec bytes) {
  const auto odd = hn::BitCast(kShortInts, bytes);
  const auto even = hn::ShiftLeft<8>(odd);
  return {{hn::BitCast(kBytes, hn::ShiftRight<8>(even)),
           hn::BitCast(kBytes, hn::ShiftRight<8>(odd))}};
}

// Returns, for each 32-bit lane, the sum of its two products of 16-bit numbers.
HWY_INLINE IntVec MulPairs(ByteVec a, ByteVec b) {
#if HWY_TARGET <= HWY_AVX3 && HWY_ARCH_X86
  return IntVec{_mm512_madd_epi16(a.raw, b.raw)};
#elif HWY_TARGET == HWY_AVX2
  return IntVec{_mm256_madd_epi16(a.raw, b.raw)};
#else
  const IntVec a32 = hn::BitCast(kInts, a);
  const IntVec b32 = hn::BitCast(kInts, b);
  const auto low = [](IntVec x) {
    return hn::ShiftRight<16>(hn::ShiftLeft<16>(x));
  };
  return hn::Add(hn::Mul(low(a32), low(b32)),
                 hn::Mul(hn::ShiftRight<16>(a32), hn::ShiftRight<16>(b32)));
#endif
}
// Computes, for every 32-bit lane, the sum of the products of numbers and
// integers. `even` and `odd` have the integers of the even and of the odd ones
// of the four numbers. With digits of bytes, these instruction sets would need
// six instructions in place of four.
class DigitSums {
 public:
  HWY_INLINE DigitSums() {}
  // integers[0] has the even integers of all lanes, integers[1] the odd ones.
  HWY_INLINE void AddUnsigned(const Numbers& numbers,
                              const uint32_t* integers) {
    AddSigned(numbers, AsBytes(hn::Set(kWords, integers[0])),
              AsBytes(hn::Set(kWords, integers[1])));
  }
  HWY_INLINE void AddSigned(const Numbers& numbers, ByteVec even, ByteVec odd) {
    total_ = hn::Add(total_, hn::Add(MulPairs(numbers.parts[0], even),
                                     MulPairs(numbers.parts[1], odd)));
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
    low = hn::OrAnd(low, high, hn::Set(kWords, kMask));
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

// Register tiles have at most kDotRows rows, or kMostDotRows if the codes are
// unpacked for each tile. kDotSums is the most DigitSums of a tile, which is
// rows times vectors. Builds with sanitizers use smaller tiles, because larger
// ones take too long to compile.
inline constexpr bool kSmallTiles = KVASIR_TILE_ROWS < 4;
inline constexpr int kDotRows = kSmallTiles ? 1 : 4;
inline constexpr int kMostDotRows = kSmallTiles ? 1 : kBlocks == 4 ? 8 : 4;
inline constexpr int kDotSums = kSmallTiles ? 1 : 8;

// Divides rows into register tiles of 8, 4, 2 or 1 rows (at most kMost), and
// calls run(height, first row) for each tile.
template <int kMost, typename Run>
HWY_INLINE void ForTiles(int64_t rows, const Run& run, int64_t row = 0) {
  for (; row + kMost <= rows; row += kMost) {
    run(std::integral_constant<int, kMost>(), row);
  }
  if constexpr (kMost > 1) ForTiles<kMost / 2>(rows, run, row);
}

#endif
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_CODE_BYTES_INL_H_
