#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/latents/code_pack.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/cpu/code_tile_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/cpu/code_tile-inl.h"
#include "kernels/simd/codes-inl.h"
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

// What a word's lowest bits stand for, whatever lies above them: a code, or, of
// 16 bits, a bfloat16.
template <int kBits>
class CodeNumbers {
 public:
#if HWY_TARGET <= HWY_AVX3
  // A lane is looked up by the lowest four bits of its index.
  static constexpr bool kByTable = kBits <= 4;
  CodeNumbers() {
    if constexpr (kByTable) {
      HWY_ALIGN float numbers[kVecLanes];
      for (int i = 0; i < kVecLanes; ++i) {
        numbers[i] = static_cast<float>(i & ((1 << kBits) - 1));
      }
      table_ = hn::Load(kFloats, numbers);
    }
  }
  HWY_INLINE Vec operator()(WordVec word) const {
    if constexpr (kByTable) {
      return Vec{_mm512_permutexvar_ps(word.raw, table_.raw)};
    } else {
      return Convert(word);
    }
  }

 private:
  Vec table_;
#else
  HWY_INLINE Vec operator()(WordVec word) const { return Convert(word); }

 private:
#endif
  static HWY_INLINE Vec Convert(WordVec word) {
    if constexpr (kBits == 16) {
      return hn::BitCast(kFloats, hn::ShiftLeft<16>(word));
    } else {
      const hn::RebindToSigned<Floats> d32;
      const WordVec code = hn::And(word, hn::Set(kWords, (1u << kBits) - 1u));
      return hn::ConvertTo(kFloats, hn::BitCast(d32, code));
    }
  }
};

// Bits 0 and 1 of a word, and bit 2 of another.
HWY_INLINE WordVec WithThirdBit(WordVec low, WordVec third) {
  return hn::Or(hn::And(low, hn::Set(kWords, 3u)),
                hn::And(third, hn::Set(kWords, 4u)));
}

// Vectors of codes beside each other: few rows have too few accumulators.
template <int kRows>
inline constexpr int kVecsOf =
    2 * kCodeTileVecs* kRows <= kCodeTileSums ? 2 * kCodeTileVecs
                                              : kCodeTileVecs;

// Lines to ask for meanwhile: as many as it takes to hold `bytes`.
constexpr int LinesOf(int64_t bytes) {
  return static_cast<int>((bytes + AheadLines::kLineBytes - 1) /
                          AheadLines::kLineBytes);
}

// Values are asked for every few slots: to ask takes a moment, too.
inline constexpr int64_t kSlotsPerAsk = 4;

// acc += numbers of each row times codes.
template <int kRows, int kVecs>
HWY_INLINE void AddProducts(const float* const (&a)[kRows], int64_t index,
                            const Vec (&codes)[kVecs],
                            Vec (&acc)[kRows][kVecs]) {
  for (int r = 0; r < kRows; ++r) {
    const Vec factor = Broadcast(a[r][index]);
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = Fma(factor, codes[v], acc[r][v]);
    }
  }
}

// ----- Keys: vectors of slots, channel after channel.

inline constexpr int64_t kSlots = 64;

template <int kVecs>
HWY_INLINE void LoadWords(const uint32_t* from, WordVec (&words)[kVecs]) {
  for (int v = 0; v < kVecs; ++v) {
    words[v] = hn::LoadU(kWords, from + v * kVecLanes);
  }
}

// Moves third bits so that the one at `bit` (0 or 16) becomes bit 2.
template <int kVecs>
HWY_INLINE void StartThird(int64_t bit, WordVec (&third)[kVecs]) {
  for (int v = 0; v < kVecs; ++v) {
    third[v] = bit == 0 ? hn::RotateRight<30>(third[v])
                        : hn::RotateRight<14>(third[v]);
  }
}

// The code in the lowest bits of `low`; the next third bit moves up.
template <int kBits, bool kThird, int kVecs>
HWY_INLINE void TakeCodes(const CodeNumbers<kThird ? 3 : kBits>& numbers,
                          const WordVec (&low)[kVecs], WordVec (&third)[kVecs],
                          Vec (&codes)[kVecs]) {
  for (int v = 0; v < kVecs; ++v) {
    if constexpr (kThird) {
      codes[v] = numbers(WithThirdBit(low[v], third[v]));
      third[v] = hn::RotateRight<1>(third[v]);
    } else {
      (void)third;
      codes[v] = numbers(low[v]);
    }
  }
}

// A whole word of codes, from code kIndex on.
template <int kBits, bool kThird, int kRows, int kVecs, int kIndex>
HWY_INLINE void AddWord(const CodeNumbers<kThird ? 3 : kBits>& numbers,
                        const WordVec (&words)[kVecs], WordVec (&third)[kVecs],
                        const float* const (&a)[kRows],
                        Vec (&acc)[kRows][kVecs]) {
  if constexpr (kIndex * kBits < 32) {
    Vec codes[kVecs];
    if constexpr (kBits == 16 && kIndex == 1) {
      for (int v = 0; v < kVecs; ++v) {
        codes[v] = hn::BitCast(kFloats,
                               hn::And(words[v], hn::Set(kWords, 0xffff0000u)));
      }
    } else {
      WordVec low[kVecs];
      for (int v = 0; v < kVecs; ++v) {
        low[v] = hn::ShiftRight<kIndex * kBits>(words[v]);
      }
      TakeCodes<kBits, kThird, kVecs>(numbers, low, third, codes);
    }
    AddProducts(a, kIndex, codes, acc);
    AddWord<kBits, kThird, kRows, kVecs, kIndex + 1>(numbers, words, third, a,
                                                     acc);
  } else {
    (void)numbers, (void)words, (void)third, (void)a, (void)acc;
  }
}

// Whole words of codes.
template <int kBits, bool kThird, int kRows>
void KeyTile(const KeyCodesArgs& args, int64_t column) {
  constexpr int kPerWord = 32 / kBits;
  constexpr int kVecs = kVecsOf<kRows>;
  // Who brought the words into cache asked for the other half.
  constexpr int kLinesPerWord = LinesOf(4 * kVecs * kVecLanes / 2);
  const CodeNumbers<kThird ? 3 : kBits> numbers;
  float* const c = args.c + column;
  const float* a[kRows];
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    a[r] = args.a + r * args.a_stride;
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = args.accumulate
                      ? LoadFloats(c + r * args.c_stride + v * kVecLanes)
                      : hn::Zero(kFloats);
    }
  }
  const uint32_t* low = args.low + args.place.low_bit / 32 * kSlots + column;
  WordVec words[kVecs];
  WordVec third[kVecs];
  for (int v = 0; v < kVecs; ++v) third[v] = hn::Zero(kWords);
  for (int64_t i = 0; i < args.depth; i += kPerWord) {
    LoadWords(low, words);
    low += kSlots;
    if constexpr (kThird) {
      const int64_t third_bit = args.place.third_bit + i;
      LoadWords(args.third + third_bit / 32 * kSlots + column, third);
      StartThird(third_bit % 32, third);
    }
    const float* from[kRows];
    for (int r = 0; r < kRows; ++r) from[r] = a[r] + i;
    args.ahead->Ask(kLinesPerWord);
    AddWord<kBits, kThird, kRows, kVecs, 0>(numbers, words, third, from, acc);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(acc[r][v], kFloats, c + r * args.c_stride + v * kVecLanes);
    }
  }
}

// What stands at a bit of each slot's words, in the lowest bits.
HWY_INLINE WordVec WordsAt(const uint32_t* words, int64_t bit, int64_t column) {
  return hn::ShiftRightSame(
      hn::LoadU(kWords, words + bit / 32 * kSlots + column),
      static_cast<int>(bit % 32));
}

// Codes that do not fill a word, one after the other.
template <int kBits, bool kThird>
void AddSingleKeys(int64_t rows, const KeyCodesArgs& args) {
  const CodeNumbers<kThird ? 3 : kBits> numbers;
  for (int64_t s = 0; s < kSlots; s += kVecLanes) {
    for (int64_t r = 0; r < rows; ++r) {
      float* const c = args.c + r * args.c_stride + s;
      Vec sum = args.accumulate ? LoadFloats(c) : hn::Zero(kFloats);
      for (int64_t i = 0; i < args.depth; ++i) {
        WordVec word = WordsAt(args.low, args.place.low_bit + i * kBits, s);
        if constexpr (kThird) {
          const WordVec third =
              WordsAt(args.third, args.place.third_bit + i, s);
          word = WithThirdBit(word, hn::ShiftLeft<2>(third));
        }
        sum = Fma(Broadcast(args.a[r * args.a_stride + i]), numbers(word), sum);
      }
      hn::StoreU(sum, kFloats, c);
    }
  }
}

// ----- Values: vectors of channels, slot after slot.

template <typename T>
HWY_INLINE T ReadWord(const char* from) {
  T word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// Codes of kVecLanes channels of a slot. Sixteen 4-bit codes stand in two
// words: their lanes alternate between both.
template <int kBits>
class SlotCodes {
 public:
  static constexpr int64_t kBytes = kVecLanes * kBits / 8;
  static constexpr bool kAlternate = kBytes == 8;

  SlotCodes() {
    HWY_ALIGN uint32_t shifts[kVecLanes];
    for (uint32_t i = 0; i < kVecLanes; ++i) {
      shifts[i] = kBits * (kAlternate ? i / 2 : i);
    }
    shifts_ = hn::Load(kWords, shifts);
  }

  // Codes in the lowest bits, whatever lies above them.
  HWY_INLINE WordVec At(const char* from) const {
    return hn::Shr(Spread(from), shifts_);
  }

  // From channel order to that of the lanes, and back.
  static HWY_INLINE Vec ToLanes(Vec channels) {
    if constexpr (kAlternate) {
      HWY_ALIGN static constexpr int32_t kOrder[16] = {
          0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15};
      return Reorder(channels, kOrder);
    } else {
      return channels;
    }
  }
  static HWY_INLINE Vec FromLanes(Vec lanes) {
    if constexpr (kAlternate) {
      HWY_ALIGN static constexpr int32_t kOrder[16] = {
          0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15};
      return Reorder(lanes, kOrder);
    } else {
      return lanes;
    }
  }

 private:
  static HWY_INLINE Vec Reorder(Vec numbers, const int32_t* order) {
    return hn::TableLookupLanes(numbers, hn::SetTableIndices(kFloats, order));
  }
  static HWY_INLINE WordVec Spread(const char* from) {
    if constexpr (kBytes == 8) {
      const hn::Repartition<uint64_t, Words> d64;
      return hn::BitCast(kWords, hn::Set(d64, ReadWord<uint64_t>(from)));
    } else if constexpr (kBytes == 4) {
      return hn::Set(kWords, ReadWord<uint32_t>(from));
    } else if constexpr (kBytes == 2) {
      return hn::Set(kWords, uint32_t{ReadWord<uint16_t>(from)});
    } else {
      return hn::Set(kWords, uint32_t{ReadWord<uint8_t>(from)});
    }
  }

  WordVec shifts_;
};

// The third bits of as many channels, in bit 2.
class SlotThirdBits {
 public:
  static constexpr int64_t kBytes = kVecLanes / 8;

  SlotThirdBits() : shifts_(hn::Iota(kWords, 14u)) {}

  HWY_INLINE WordVec At(const char* from) const {
    uint32_t bits = 0;
    std::memcpy(&bits, from, kBytes > 0 ? kBytes : 1);
    return hn::Shr(hn::Set(kWords, bits << 16), shifts_);
  }

 private:
  WordVec shifts_;
};

template <int kBits, bool kThird, int kRows, int kVecs>
void ValueTile(const ValueCodesArgs& args, int64_t column) {
  const CodeNumbers<kThird ? 3 : kBits> numbers;
  const SlotCodes<kBits> low;
  const SlotThirdBits high;
  const int64_t low_byte = (args.place.low_bit + column * kBits) / 8;
  const int64_t third_byte = kThird ? (args.place.third_bit + column) / 8 : 0;
  constexpr int64_t kBytesPerSlot =
      std::max<int64_t>(kVecs * SlotCodes<kBits>::kBytes, 1);
  constexpr int64_t kSlotsBetweenAsks =
      std::max(AheadLines::kLineBytes / kBytesPerSlot, kSlotsPerAsk);
  constexpr int kLines = LinesOf(kSlotsBetweenAsks * kBytesPerSlot);
  float* const c = args.c + column;
  const float* a[kRows];
  Vec acc[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    a[r] = args.a + r * kSlots;
    for (int v = 0; v < kVecs; ++v) {
      acc[r][v] = SlotCodes<kBits>::ToLanes(
          LoadFloats(c + r * args.c_stride + v * kVecLanes));
    }
  }
  for (int64_t s = 0; s < args.depth; ++s) {
    const char* slot = args.slots[s];
    Vec codes[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      WordVec word = low.At(slot + low_byte + v * SlotCodes<kBits>::kBytes);
      if constexpr (kThird) {
        word = WithThirdBit(
            word, high.At(slot + third_byte + v * SlotThirdBits::kBytes));
      }
      codes[v] = numbers(word);
    }
    AddProducts(a, s, codes, acc);
    if (s % kSlotsBetweenAsks == 0) args.ahead->Ask(kLines);
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(SlotCodes<kBits>::FromLanes(acc[r][v]), kFloats,
                 c + r * args.c_stride + v * kVecLanes);
    }
  }
}

// A pair of bfloat16s in each lane: the accumulators of even channels stand
// beside those of odd ones.
template <int kRows, int kVecs>
void PairsTile(const ValuePairsArgs& args, int64_t column) {
  constexpr int kPairs = kVecs / 2;
  constexpr int64_t kPairBytes = 4 * kVecLanes;
  float* const c = args.c + column;
  const char* from = args.slots + 2 * column;
  constexpr int kLines = LinesOf(kSlotsPerAsk * kPairs * kPairBytes);
  const float* a[kRows];
  Vec even[kRows][kPairs];
  Vec odd[kRows][kPairs];
  for (int r = 0; r < kRows; ++r) {
    a[r] = args.a + r * kSlots;
    for (int v = 0; v < kPairs; ++v) {
      hn::LoadInterleaved2(kFloats, c + r * args.c_stride + 2 * v * kVecLanes,
                           even[r][v], odd[r][v]);
    }
  }
  const WordVec high_half = hn::Set(kWords, 0xffff0000u);
  for (int64_t s = 0; s < args.depth; ++s) {
    Vec low[kPairs];
    Vec high[kPairs];
    for (int v = 0; v < kPairs; ++v) {
      const auto* words = reinterpret_cast<const uint32_t*>(from);
      const WordVec pairs = hn::LoadU(kWords, words + v * kVecLanes);
      low[v] = hn::BitCast(kFloats, hn::ShiftLeft<16>(pairs));
      high[v] = hn::BitCast(kFloats, hn::And(pairs, high_half));
    }
    if (s % kSlotsPerAsk == 0) args.ahead->Ask(kLines);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Broadcast(a[r][s]);
      for (int v = 0; v < kPairs; ++v) {
        even[r][v] = Fma(factor, low[v], even[r][v]);
        odd[r][v] = Fma(factor, high[v], odd[r][v]);
      }
    }
    from += args.slot_bytes;
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kPairs; ++v) {
      hn::StoreInterleaved2(even[r][v], odd[r][v], kFloats,
                            c + r * args.c_stride + 2 * v * kVecLanes);
    }
  }
}

// ----- Choice of a tile.

template <int kBits, bool kThird, int kRows>
void KeyRow(int rows, const KeyCodesArgs& args) {
  if (rows == kRows) {
    for (int64_t s = 0; s < kSlots; s += kVecsOf<kRows> * kVecLanes) {
      KeyTile<kBits, kThird, kRows>(args, s);
    }
  } else if constexpr (kRows > 1) {
    KeyRow<kBits, kThird, kRows - 1>(rows, args);
  }
}

template <int kBits, bool kThird, int kRows>
void ValueRow(int rows, const ValueCodesArgs& args) {
  if (rows == kRows) {
    int64_t i = 0;
    constexpr int64_t kColumns = kVecsOf<kRows> * kVecLanes;
    for (; i + kColumns <= args.columns; i += kColumns) {
      ValueTile<kBits, kThird, kRows, kVecsOf<kRows>>(args, i);
    }
    for (; i < args.columns; i += kCodeTileColumns) {
      ValueTile<kBits, kThird, kRows, kCodeTileVecs>(args, i);
    }
  } else if constexpr (kRows > 1) {
    ValueRow<kBits, kThird, kRows - 1>(rows, args);
  }
}

// Tiles from `column` on, as wide as accumulators and columns allow.
template <int kRows, int kVecs>
void PairsColumns(const ValuePairsArgs& args, int64_t column) {
  constexpr int64_t kColumns = kVecs * kVecLanes;
  if constexpr (kVecs == kCodeTileVecs || kRows * kVecs <= kCodeTileSums) {
    for (; column + kColumns <= args.columns; column += kColumns) {
      PairsTile<kRows, kVecs>(args, column);
    }
  }
  if constexpr (kVecs > kCodeTileVecs) {
    if (column < args.columns) PairsColumns<kRows, kVecs / 2>(args, column);
  }
}

template <int kRows>
void PairsRow(int rows, const ValuePairsArgs& args) {
  if (rows == kRows) {
    PairsColumns<kRows, 4 * kCodeTileVecs>(args, 0);
  } else if constexpr (kRows > 1) {
    PairsRow<kRows - 1>(rows, args);
  }
}

// Calls run(height, args) for tiles of rows of nearly one height.
template <typename Args, typename Run>
HWY_INLINE void ForTiles(int64_t rows, int64_t a_stride, const Args& args,
                         const Run& run) {
  if (rows <= kCodeTileRows) return run(static_cast<int>(rows), args);
  Args tile = args;
  while (rows > 0) {
    const int64_t tiles = (rows + kCodeTileRows - 1) / kCodeTileRows;
    const int64_t height = rows / tiles;
    run(static_cast<int>(height), tile);
    tile.a += height * a_stride;
    tile.c += height * args.c_stride;
    rows -= height;
  }
}

template <int kBits, bool kThird>
void KeyWords(int64_t rows, const KeyCodesArgs& args) {
  ForTiles(rows, args.a_stride, args, [](int height, const auto& tile) {
    KeyRow<kBits, kThird, kCodeTileRows>(height, tile);
  });
}

// The `count` codes of args from `begin` on.
template <int kBits, bool kThird>
KeyCodesArgs PartOf(KeyCodesArgs args, int64_t begin, int64_t count) {
  args.a += begin;
  args.place.low_bit += begin * kBits;
  args.place.third_bit += kThird ? begin : 0;
  args.accumulate = args.accumulate || begin > 0;
  args.depth = count;
  return args;
}

template <int kBits, bool kThird>
void KeyCodes(int64_t rows, const KeyCodesArgs& args) {
  constexpr int64_t kPerWord = 32 / kBits;
  const int64_t in_word = args.place.low_bit % 32 / kBits;
  if (in_word == 0 && args.depth % kPerWord == 0) {
    return KeyWords<kBits, kThird>(rows, args);
  }
  // Those that end a word, whole words, and those that begin one.
  const int64_t begin = std::min(args.depth, (kPerWord - in_word) % kPerWord);
  const int64_t end = begin + (args.depth - begin) / kPerWord * kPerWord;
  if (begin > 0) {
    AddSingleKeys<kBits, kThird>(rows, PartOf<kBits, kThird>(args, 0, begin));
  }
  if (begin < end) {
    KeyWords<kBits, kThird>(rows,
                            PartOf<kBits, kThird>(args, begin, end - begin));
  }
  if (end < args.depth) {
    AddSingleKeys<kBits, kThird>(
        rows, PartOf<kBits, kThird>(args, end, args.depth - end));
  }
}

}  // namespace

void RunKeyCodes(int64_t rows, const KeyCodesArgs& args) {
  if (args.place.third_bit >= 0) {
    KeyCodes<2, true>(rows, args);
  } else if (args.place.low_bits == 16) {
    KeyCodes<16, false>(rows, args);
  } else if (args.place.low_bits == 8) {
    KeyCodes<8, false>(rows, args);
  } else if (args.place.low_bits == 4) {
    KeyCodes<4, false>(rows, args);
  } else if (args.place.low_bits == 2) {
    KeyCodes<2, false>(rows, args);
  } else {
    KeyCodes<1, false>(rows, args);
  }
}

void RunValueCodes(int64_t rows, const ValueCodesArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValueCodesArgs& tile) {
    if (tile.place.third_bit >= 0) {
      ValueRow<2, true, kCodeTileRows>(height, tile);
    } else if (tile.place.low_bits == 4) {
      ValueRow<4, false, kCodeTileRows>(height, tile);
    } else if (tile.place.low_bits == 2) {
      ValueRow<2, false, kCodeTileRows>(height, tile);
    } else {
      ValueRow<1, false, kCodeTileRows>(height, tile);
    }
  });
}

void RunValuePairs(int64_t rows, const ValuePairsArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValuePairsArgs& tile) {
    PairsRow<kCodeTileRows>(height, tile);
  });
}

#else  // nobody calls them: see TakesKeyCodes
void RunKeyCodes(int64_t, const KeyCodesArgs&) {}
void RunValueCodes(int64_t, const ValueCodesArgs&) {}
void RunValuePairs(int64_t, const ValuePairsArgs&) {}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();
