#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/attention/cpu/code_dots.h"

// Highway compiles the target AVX3_DL only on request. It has the VNNI
// instructions, which multiply bytes and add the products.
#define HWY_WANT_AVX3_DL 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/cpu/key_dots_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/cpu/code_bytes-inl.h"
#include "kernels/attention/cpu/tile_sums-inl.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kSlots = 64;
#if HWY_TARGET == HWY_SCALAR

void KeyDots(int64_t rows, const KeyDotsArgs& args) {
  const CodePiece& piece = *args.piece;
  const int per_byte = 8 / piece.place.low_bits;
  const int per_word = 4 * per_byte;
  const auto bits_at = [&](int bits, int64_t bit, int64_t slot) {
    const uint32_t* const words = args.planes[PlaneIndex(bits)] + slot;
    return words[bit / 32 * kSlots] >> (bit % 32) & ((1u << bits) - 1);
  };
  for (int64_t r = 0; r < rows; ++r) {
    const uint32_t* const digits = args.digits + r * args.digits_stride;
    for (int64_t s = 0; s < kSlots; ++s) {
      CodePlace place = piece.in_chunk;
      int32_t total = 0;
      for (int64_t c = 0; c < piece.width; ++c, place.Skip(1)) {
        uint32_t code = bits_at(place.low_bits, place.low_bit, s);
        if (place.high_bits > 0) {
          code |= bits_at(place.high_bits, place.high_bit, s) << place.low_bits;
        }
        const int64_t word = c / per_word * per_byte + c % per_byte;
        const auto shift = static_cast<unsigned>(c % per_word / per_byte * 8);
        const auto digit = [&](uint32_t four) {
          return int32_t{static_cast<int8_t>(four >> shift & 0xff)};
        };
        const int32_t integer = (digit(digits[2 + 2 * word]) << kDigitBits) +
                                digit(digits[3 + 2 * word]);
        total +=
            integer * (args.levels != nullptr ? int32_t{args.levels[code]}
                                              : static_cast<int32_t>(code));
      }
      float& sum = args.c[r * kSlots + s];
      sum = std::fma(std::bit_cast<float>(digits[0]), static_cast<float>(total),
                     args.accumulate ? sum : 0.0f);
    }
  }
}

#else

// ----- Keys: a 32-bit lane has four channels of one slot.

// This offset is added to the integers of levels, because the instructions
// require that the bytes of codes are unsigned.
constexpr int kLevelOffset = 128;

// Loads kTaken bits of each slot, from bit `bit` of the slot's words on, into
// the lowest bits of the lanes of `bits`.
template <int kTaken, int kVecs>
HWY_INLINE void LoadBits(const uint32_t* words, int64_t bit,
                         WordVec (&bits)[kVecs]) {
  const uint32_t* from = words + bit / 32 * kSlots;
  const auto shift = static_cast<int>(bit % 32);
  for (int v = 0; v < kVecs; ++v) {
    bits[v] = hn::LoadU(kWords, from + v * kVecLanes);
  }
  if (shift == 0) return;
  for (int v = 0; v < kVecs; ++v) bits[v] = hn::ShiftRightSame(bits[v], shift);
  if (shift + kTaken <= 32) return;
  for (int v = 0; v < kVecs; ++v) {
    const WordVec next = hn::LoadU(kWords, from + kSlots + v * kVecLanes);
    bits[v] = hn::Or(bits[v], hn::ShiftLeftSame(next, 32 - shift));
  }
}

// Distributes the lowest 4 * kBits bits of each word to its four bytes. Each
// byte gets kBits bits, shifted left by kLow.
template <int kBits, int kLow>
HWY_INLINE WordVec Spread(WordVec word) {
  if constexpr (kBits == 0) {
    return word;
  } else {
    constexpr uint32_t kTwo = (1u << (2 * kBits)) - 1;
    constexpr uint32_t kOne = (1u << kBits) - 1;
    word = hn::Or(hn::And(word, hn::Set(kWords, kTwo)),
                  hn::ShiftLeft<16 - 2 * kBits>(
                      hn::And(word, hn::Set(kWords, kTwo << (2 * kBits)))));
    word = hn::Or(hn::And(word, hn::Set(kWords, 0x00010001u * kOne)),
                  hn::ShiftLeft<8 - kBits>(hn::And(
                      word, hn::Set(kWords, 0x00010001u * kOne << kBits))));
    return hn::ShiftLeft<kLow>(word);
  }
}

template <class Kind, int kRows, int kVecs>
void KeyTile(const KeyDotsArgs& args, int64_t column, ByteVec table) {
  constexpr int kLow = Kind::kLowBits;
  constexpr int kHigh = Kind::kHighBits;
  const CodePlace& place = args.piece->in_chunk;
  const uint32_t* low_plane = args.planes[PlaneIndex(kLow)] + column;
  const uint32_t* high_plane =
      args.planes[kHigh > 0 ? PlaneIndex(kHigh) : 0] + column;
  const uint32_t* digits[kRows];
  for (int r = 0; r < kRows; ++r) {
    digits[r] = args.digits + r * args.digits_stride + 2;
  }
  // Prefetches half as many lines as the words fill. The loader of the words
  // has prefetched the other half.
  constexpr int64_t kLinesPerWord =
      LinesOf(Kind::kPerWord * (kLow + kHigh) * kVecs * kVecLanes / 8 / 2);
  DigitSums sums[kRows][kVecs];
  const int64_t words =
      (args.piece->width + Kind::kPerWord - 1) / Kind::kPerWord;
  for (int64_t w = 0; w < words; ++w) {
    WordVec low[kVecs];
    WordVec high[kVecs];
    LoadBits<32>(low_plane, place.low_bit + w * 32, low);
    if constexpr (kHigh > 0) {
      LoadBits<Kind::kHighPerWord>(
          high_plane, place.high_bit + w * Kind::kHighPerWord, high);
      for (int v = 0; v < kVecs; ++v) {
        high[v] = Spread<Kind::kHighPerWord / 4, kLow>(high[v]);
      }
    }
    ForEach<Kind::kPerByte>([&](auto t) KVASIR_INLINE_LAMBDA {
      Numbers codes[kVecs];
      ForEach<kVecs>([&](auto v) KVASIR_INLINE_LAMBDA {
        codes[v] = UnsignedNumbers(TakeCodes<Kind, t>(low[v], high[v], table));
      });
      ForEach<kRows>([&](auto r) KVASIR_INLINE_LAMBDA {
        ForEach<kVecs>([&](auto v) KVASIR_INLINE_LAMBDA {
          sums[r][v].AddUnsigned(codes[v], digits[r] + 2 * t);
        });
      });
    });
    for (int r = 0; r < kRows; ++r) digits[r] += 2 * Kind::kPerByte;
    args.ahead->Ask(kLinesPerWord);
  }
  ForEach<kRows>([&](auto r) KVASIR_INLINE_LAMBDA {
    const uint32_t* const own = args.digits + r * args.digits_stride;
    const Vec unit = Broadcast(std::bit_cast<float>(own[0]));
    const auto sum = static_cast<int32_t>(own[1]);
    const IntVec offset =
        hn::Set(kInts, Kind::kLevels ? -kLevelOffset * sum : 0);
    float* const c = args.c + r * kSlots + column;
    ForEach<kVecs>([&](auto v) KVASIR_INLINE_LAMBDA {
      const Vec total =
          hn::ConvertTo(kFloats, hn::Add(sums[r][v].Total(), offset));
      const Vec old =
          args.accumulate ? LoadFloats(c + v * kVecLanes) : hn::Zero(kFloats);
      hn::StoreU(Fma(unit, total, old), kFloats, c + v * kVecLanes);
    });
  });
}

template <class Kind, int kRows>
void KeyRows(const KeyDotsArgs& args, ByteVec table) {
  constexpr int kVecs = kSmallTiles ? 1 : std::min(kDotSums / kRows, 4);
  for (int64_t s = 0; s < kSlots; s += kVecs * kVecLanes) {
    KeyTile<Kind, kRows, kVecs>(args, s, table);
  }
}

void KeyDots(int64_t rows, const KeyDotsArgs& args) {
  const ByteVec table = LevelTable(args.levels, kLevelOffset);
  ForKind(args.piece->place, args.levels != nullptr, [&](auto kind) {
    using Kind = decltype(kind);
    // Codes of 8 bits need no unpacking, so larger tiles would not be faster.
    constexpr int kMost = Kind::kLowBits == 8 ? kDotRows : kMostDotRows;
    ForTiles<kMost>(rows, [&](auto height, int64_t row) {
      KeyDotsArgs tile = args;
      tile.digits += row * args.digits_stride;
      tile.c += row * kSlots;
      KeyRows<Kind, height>(tile, table);
    });
  });
}

#endif

// ----- Digits of queries.

void CutDigits(const CodePiece& piece, const float* q, float step,
               uint32_t* digits) {
  DigitRange range;
  for (int64_t c = 0; c < piece.width; ++c) range.Add(q[c]);
  const DigitScale scale = DigitScale::Of(range.largest(), kMostQueryDigits);
  const int64_t words = DigitWords(piece);
  std::fill_n(digits, words, 0u);
  digits[0] = std::bit_cast<uint32_t>(scale.unit * step);
  if (scale.inverse == 0.0f) return;
  const int per_byte = 8 / piece.place.low_bits;
  const int per_word = 4 * per_byte;
  int32_t sum = 0;
  for (int64_t c = 0; c < piece.width; ++c) {
    const int32_t integer = scale.Round(q[c]);
    sum += integer;
    const int64_t in_word = c % per_word;
    const int64_t word = c / per_word * per_byte + in_word % per_byte;
    uint32_t* const two = digits + 2 + 2 * word;
    const auto place = static_cast<unsigned>(in_word / per_byte);  // of four
    if constexpr (kDigitsAreBytes) {
      const int32_t high = HighQueryDigit(integer);
      const int32_t low = integer - (high << kDigitBits);
      two[0] |= (static_cast<uint32_t>(high) & 0xffu) << (8 * place);
      two[1] |= (static_cast<uint32_t>(low) & 0xffu) << (8 * place);
    } else {
      two[place % 2] |= (static_cast<uint32_t>(integer) & 0xffffu)
                        << (16 * (place / 2));
    }
  }
  digits[1] = static_cast<uint32_t>(sum);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {

HWY_EXPORT(KeyDots);
HWY_EXPORT(CutDigits);

void RunKeyDots(int64_t rows, const KeyDotsArgs& args) {
  HWY_DYNAMIC_DISPATCH(KeyDots)(rows, args);
}
void CutQuery(const CodePiece& piece, const float* q, float step,
              uint32_t* digits) {
  HWY_DYNAMIC_DISPATCH(CutDigits)(piece, q, step, digits);
}

}  // namespace kvasir::kernels
#endif
