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

// How codes are taken apart: kLow lowest bits in one plane and kHigh above them
// in another (16 and 0: bfloat16s), and whether they stand for levels.
template <int kLow, int kHigh, bool kByLevel = false>
struct CodeKind {
  static constexpr int kLowBits = kLow;
  static constexpr int kHighBits = kHigh;
  static constexpr int kBits = kLow + kHigh;
  static constexpr bool kLevels = kByLevel;
};

// What a word's lowest bits stand for, whatever lies above them: a code, or, of
// 16 bits, a bfloat16.
template <class Code>
class CodeNumbers {
 public:
#if HWY_TARGET <= HWY_AVX3
  // A lane is looked up by the lowest four bits of its index: levels come as
  // cheap as codes.
  static constexpr bool kByTable = Code::kBits <= 4;
  explicit CodeNumbers(const float* levels) {
    if constexpr (kByTable) {
      HWY_ALIGN float numbers[kVecLanes];
      for (int i = 0; i < kVecLanes; ++i) {
        const int code = i & ((1 << Code::kBits) - 1);
        numbers[i] =
            levels != nullptr ? levels[code] : static_cast<float>(code);
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
  explicit CodeNumbers(const float* levels) : table_(levels) {}
  HWY_INLINE Vec operator()(WordVec word) const {
    if constexpr (Code::kLevels) {
      const WordVec mask = hn::Set(kWords, (1u << Code::kBits) - 1u);
      return table_.At(Code::kBits < 4 ? hn::And(word, mask) : word);
    } else {
      return Convert(word);
    }
  }

 private:
  LevelTable table_;
#endif
  static HWY_INLINE Vec Convert(WordVec word) {
    if constexpr (Code::kBits == 16) {
      return hn::BitCast(kFloats, hn::ShiftLeft<16>(word));
    } else {
      const hn::RebindToSigned<Floats> d32;
      const WordVec code =
          hn::And(word, hn::Set(kWords, (1u << Code::kBits) - 1u));
      return hn::ConvertTo(kFloats, hn::BitCast(d32, code));
    }
  }
};

// The lowest kLow bits of a word, and the kHigh above them of another.
template <int kLow, int kHigh>
HWY_INLINE WordVec WithHighBits(WordVec low, WordVec high) {
  constexpr uint32_t kLowMask = (1u << kLow) - 1;
  constexpr uint32_t kHighMask = ((1u << kHigh) - 1) << kLow;
  return hn::Or(hn::And(low, hn::Set(kWords, kLowMask)),
                hn::And(high, hn::Set(kWords, kHighMask)));
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

// The high bits of a word's codes, from `bit` of `words` on, so that those of
// the first code stand above its kBits low ones.
template <int kBits, int kHigh, int kVecs>
HWY_INLINE void LoadHigh(const uint32_t* words, int64_t bit,
                         WordVec (&high)[kVecs]) {
  constexpr int kTaken = 32 / kBits * kHigh;
  const uint32_t* from = words + bit / 32 * kSlots;
  const auto shift = static_cast<int>(bit % 32);
  LoadWords(from, high);
  for (int v = 0; v < kVecs; ++v) {
    high[v] = hn::ShiftRightSame(high[v], shift);
    if (shift + kTaken > 32) {
      const WordVec next = hn::LoadU(kWords, from + kSlots + v * kVecLanes);
      high[v] = hn::Or(high[v], hn::ShiftLeftSame(next, 32 - shift));
    }
    high[v] = hn::RotateRight<32 - kBits>(high[v]);
  }
}

// The code in the lowest bits of `low`; the next high bits move up.
template <class Code, int kVecs>
HWY_INLINE void TakeCodes(const CodeNumbers<Code>& numbers,
                          const WordVec (&low)[kVecs], WordVec (&high)[kVecs],
                          Vec (&codes)[kVecs]) {
  constexpr int kBits = Code::kLowBits;
  constexpr int kHigh = Code::kHighBits;
  for (int v = 0; v < kVecs; ++v) {
    if constexpr (kHigh > 0) {
      codes[v] = numbers(WithHighBits<kBits, kHigh>(low[v], high[v]));
      high[v] = hn::RotateRight<kHigh>(high[v]);
    } else {
      (void)high;
      codes[v] = numbers(low[v]);
    }
  }
}

// A whole word of codes, from code kIndex on.
template <class Code, int kRows, int kVecs, int kIndex>
HWY_INLINE void AddWord(const CodeNumbers<Code>& numbers,
                        const WordVec (&words)[kVecs], WordVec (&high)[kVecs],
                        const float* const (&a)[kRows],
                        Vec (&acc)[kRows][kVecs]) {
  constexpr int kBits = Code::kLowBits;
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
      TakeCodes<Code, kVecs>(numbers, low, high, codes);
    }
    AddProducts(a, kIndex, codes, acc);
    AddWord<Code, kRows, kVecs, kIndex + 1>(numbers, words, high, a, acc);
  } else {
    (void)numbers, (void)words, (void)high, (void)a, (void)acc;
  }
}

// Whole words of codes.
template <class Code, int kRows>
void KeyTile(const KeyCodesArgs& args, int64_t column) {
  constexpr int kBits = Code::kLowBits;
  constexpr int kHigh = Code::kHighBits;
  constexpr int kPerWord = 32 / kBits;
  constexpr int kVecs = kVecsOf<kRows>;
  // Who brought the words into cache asked for the other half.
  constexpr int kLinesPerWord = LinesOf(4 * kVecs * kVecLanes / 2);
  const CodeNumbers<Code> numbers(args.levels);
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
  WordVec high[kVecs];
  for (int v = 0; v < kVecs; ++v) high[v] = hn::Zero(kWords);
  for (int64_t i = 0; i < args.depth; i += kPerWord) {
    LoadWords(low, words);
    low += kSlots;
    if constexpr (kHigh > 0) {
      LoadHigh<kBits, kHigh>(args.high + column,
                             args.place.high_bit + i * kHigh, high);
    }
    const float* from[kRows];
    for (int r = 0; r < kRows; ++r) from[r] = a[r] + i;
    args.ahead->Ask(kLinesPerWord);
    AddWord<Code, kRows, kVecs, 0>(numbers, words, high, from, acc);
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
template <class Code>
void AddSingleKeys(int64_t rows, const KeyCodesArgs& args) {
  constexpr int kBits = Code::kLowBits;
  constexpr int kHigh = Code::kHighBits;
  const CodeNumbers<Code> numbers(args.levels);
  for (int64_t s = 0; s < kSlots; s += kVecLanes) {
    for (int64_t r = 0; r < rows; ++r) {
      float* const c = args.c + r * args.c_stride + s;
      Vec sum = args.accumulate ? LoadFloats(c) : hn::Zero(kFloats);
      for (int64_t i = 0; i < args.depth; ++i) {
        WordVec word = WordsAt(args.low, args.place.low_bit + i * kBits, s);
        if constexpr (kHigh > 0) {
          const WordVec high =
              WordsAt(args.high, args.place.high_bit + i * kHigh, s);
          word = WithHighBits<kBits, kHigh>(word, hn::ShiftLeft<kBits>(high));
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

// The kHigh high bits of as many channels, above their kBits low ones and in
// the same lanes.
template <int kBits, int kHigh>
class SlotHighBits {
 public:
  static constexpr int64_t kBytes = kVecLanes * kHigh / 8;

  SlotHighBits() {
    HWY_ALIGN uint32_t shifts[kVecLanes];
    for (uint32_t i = 0; i < kVecLanes; ++i) {
      const uint32_t channel =
          SlotCodes<kBits>::kAlternate ? i / 2 + i % 2 * (kVecLanes / 2) : i;
      shifts[i] = channel * kHigh;
    }
    shifts_ = hn::Load(kWords, shifts);
  }

  HWY_INLINE WordVec At(const char* from) const {
    uint32_t bits = 0;
    std::memcpy(&bits, from, kBytes > 0 ? kBytes : 1);
    return hn::ShiftLeft<kBits>(hn::Shr(hn::Set(kWords, bits), shifts_));
  }

 private:
  WordVec shifts_;
};

template <class Code, int kRows, int kVecs>
void ValueTile(const ValueCodesArgs& args, int64_t column) {
  constexpr int kBits = Code::kLowBits;
  constexpr int kHigh = Code::kHighBits;
  using HighBits = SlotHighBits<kBits, kHigh>;
  const CodeNumbers<Code> numbers(args.levels);
  const SlotCodes<kBits> low;
  const HighBits high;
  const int64_t low_byte = (args.place.low_bit + column * kBits) / 8;
  const int64_t high_byte = (args.place.high_bit + column * kHigh) / 8;
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
      if constexpr (kHigh > 0) {
        word = WithHighBits<kBits, kHigh>(
            word, high.At(slot + high_byte + v * HighBits::kBytes));
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

template <class Code, int kRows>
void KeyRow(int rows, const KeyCodesArgs& args) {
  if (rows == kRows) {
    for (int64_t s = 0; s < kSlots; s += kVecsOf<kRows> * kVecLanes) {
      KeyTile<Code, kRows>(args, s);
    }
  } else if constexpr (kRows > 1) {
    KeyRow<Code, kRows - 1>(rows, args);
  }
}

template <class Code, int kRows>
void ValueRow(int rows, const ValueCodesArgs& args) {
  if (rows == kRows) {
    int64_t i = 0;
    constexpr int64_t kColumns = kVecsOf<kRows> * kVecLanes;
    for (; i + kColumns <= args.columns; i += kColumns) {
      ValueTile<Code, kRows, kVecsOf<kRows>>(args, i);
    }
    for (; i < args.columns; i += kCodeTileColumns) {
      ValueTile<Code, kRows, kCodeTileVecs>(args, i);
    }
  } else if constexpr (kRows > 1) {
    ValueRow<Code, kRows - 1>(rows, args);
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

template <class Code>
void KeyWords(int64_t rows, const KeyCodesArgs& args) {
  ForTiles(rows, args.a_stride, args, [](int height, const auto& tile) {
    KeyRow<Code, kCodeTileRows>(height, tile);
  });
}

// The `count` codes of args from `begin` on.
KeyCodesArgs PartOf(KeyCodesArgs args, int64_t begin, int64_t count) {
  args.a += begin;
  args.place.Skip(begin);
  args.accumulate = args.accumulate || begin > 0;
  args.depth = count;
  return args;
}

template <class Code>
void KeyCodes(int64_t rows, const KeyCodesArgs& args) {
  constexpr int kBits = Code::kLowBits;
  constexpr int64_t kPerWord = 32 / kBits;
  const int64_t in_word = args.place.low_bit % 32 / kBits;
  if (in_word == 0 && args.depth % kPerWord == 0) {
    return KeyWords<Code>(rows, args);
  }
  // Those that end a word, whole words, and those that begin one.
  const int64_t begin = std::min(args.depth, (kPerWord - in_word) % kPerWord);
  const int64_t end = begin + (args.depth - begin) / kPerWord * kPerWord;
  if (begin > 0) {
    AddSingleKeys<Code>(rows, PartOf(args, 0, begin));
  }
  if (begin < end) {
    KeyWords<Code>(rows, PartOf(args, begin, end - begin));
  }
  if (end < args.depth) {
    AddSingleKeys<Code>(rows, PartOf(args, end, args.depth - end));
  }
}

// Calls run(kind) for codes of these bits, by levels or not.
template <bool kByLevel, typename Run>
void ForKind(int bits, const Run& run) {
  switch (bits) {
    case 6:
      return run(CodeKind<4, 2>());
    case 5:
      return run(CodeKind<4, 1>());
    case 4:
      return run(CodeKind<4, 0, kByLevel>());
    case 3:
      return run(CodeKind<2, 1, kByLevel>());
    case 2:
      return run(CodeKind<2, 0, kByLevel>());
    default:
      return run(CodeKind<1, 0, kByLevel>());
  }
}
template <typename Run>
void ForKind(int bits, const float* levels, const Run& run) {
#if HWY_TARGET > HWY_AVX3  // else levels are looked up as codes are
  if (levels != nullptr) return ForKind<true>(bits, run);
#endif
  (void)levels;
  return ForKind<false>(bits, run);
}

}  // namespace

void RunKeyCodes(int64_t rows, const KeyCodesArgs& args) {
  const int bits = args.place.bits();
  if (bits == 16) return KeyCodes<CodeKind<16, 0>>(rows, args);
  if (bits == 8) return KeyCodes<CodeKind<8, 0>>(rows, args);
  ForKind(bits, args.levels,
          [&](auto kind) { KeyCodes<decltype(kind)>(rows, args); });
}

void RunValueCodes(int64_t rows, const ValueCodesArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValueCodesArgs& tile) {
    ForKind(tile.place.bits(), tile.levels, [&](auto kind) {
      ValueRow<decltype(kind), kCodeTileRows>(height, tile);
    });
  });
}

void RunValuePairs(int64_t rows, const ValuePairsArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValuePairsArgs& tile) {
    PairsRow<kCodeTileRows>(height, tile);
  });
}

#else  // nobody calls them: see kTakesPairs
void RunKeyCodes(int64_t, const KeyCodesArgs&) {}
void RunValueCodes(int64_t, const ValueCodesArgs&) {}
void RunValuePairs(int64_t, const ValuePairsArgs&) {}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();
