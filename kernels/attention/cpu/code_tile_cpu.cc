#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/latents/code_pack.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/cpu/code_tile_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/cpu/code_tile-inl.h"
#include "kernels/attention/cpu/tile_sums-inl.h"
#include "kernels/simd/codes-inl.h"
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

// How codes are stored: the kLow lowest bits of each code in one plane, and the
// kHigh bits above them in another plane. kByLevel: each code stands for a
// level, which is looked up in a table. kLow = 16 with kHigh = 0 means bfloat16
// numbers instead of codes.
template <int kLow, int kHigh, bool kByLevel = false>
struct CodeKind {
  static constexpr int kLowBits = kLow;
  static constexpr int kHighBits = kHigh;
  static constexpr int kBits = kLow + kHigh;
  static constexpr bool kLevels = kByLevel;
};

// Converts the lowest Code::kBits bits of each word to float32: a code, which
// may be replaced by its level, or a bfloat16 number. The bits above them are
// ignored.
template <class Code>
class CodeNumbers {
 public:
#if HWY_TARGET <= HWY_AVX3
  // Codes of up to 4 bits are converted by a table lookup even if they have no
  // levels; the table then holds the codes themselves. The lookup ignores the
  // higher bits of a word, so no mask is needed.
  static constexpr bool kByTable = Code::kBits <= 4;
  explicit CodeNumbers(const float* levels) {
    if constexpr (kByTable) {
      table_ = LoadFloats(kItself.numbers);
      if (levels == nullptr) return;
      HWY_ALIGN float numbers[kVecLanes];
      for (int i = 0; i < kVecLanes; ++i) {
        numbers[i] = levels[i & ((1 << Code::kBits) - 1)];
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
  struct Table {
    constexpr Table() {
      for (int i = 0; i < 16; ++i) {
        numbers[i] = static_cast<float>(i & ((1 << Code::kBits) - 1));
      }
    }
    float numbers[16] = {};
  };
  static constexpr Table kItself = {};
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

// Takes bits from `low` where the mask is 1, and from `high` where it is 0.
HWY_INLINE WordVec SelectBits(WordVec mask, WordVec low, WordVec high) {
#if HWY_TARGET <= HWY_AVX3
  return WordVec{_mm512_ternarylogic_epi32(mask.raw, low.raw, high.raw, 0xca)};
#else
  return hn::Or(hn::And(mask, low), hn::AndNot(mask, high));
#endif
}

// Combines the lowest kLow bits of `low` with the bits above them of `high`.
template <int kLow>
HWY_INLINE WordVec WithHighBits(WordVec low, WordVec high) {
  return SelectBits(hn::Set(kWords, (1u << kLow) - 1), low, high);
}

// The number of vectors of columns in a register tile of kRows rows. A tile of
// few rows is wider, because otherwise it would have too few sums to hide the
// latency of multiply-adds.
template <int kRows>
inline constexpr int kVecsOf =
    2 * kCodeTileVecs* kRows <= kCodeTileSums ? 2 * kCodeTileVecs
                                              : kCodeTileVecs;

// The number of cache lines that hold `bytes` bytes.
constexpr int LinesOf(int64_t bytes) {
  return static_cast<int>((bytes + AheadLines::kLineBytes - 1) /
                          AheadLines::kLineBytes);
}

// Sums of values prefetch at most once per this many slots, because each call
// of AheadLines::Ask takes time.
inline constexpr int64_t kSlotsPerAsk = 4;

// ----- Keys: a vector has one channel of several slots.

inline constexpr int64_t kSlots = 64;

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

// Adds the products of codes kIndex to kCount - 1. The low bits of code 0 are
// the lowest bits of `low`. `high` is rotated so that the high bits of code
// kIndex are at their place in the code, above its low bits.
template <class Code, int kCount, int kIndex, int kRows, int kVecs>
HWY_INLINE void AddCodes(const CodeNumbers<Code>& numbers,
                         const WordVec (&low)[kVecs], WordVec (&high)[kVecs],
                         const float* const (&a)[kRows],
                         Vec (&acc)[kRows][kVecs]) {
  constexpr int kBits = Code::kLowBits;
  constexpr int kHigh = Code::kHighBits;
  if constexpr (kIndex < kCount) {
    Vec codes[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      WordVec word = low[v];
      if constexpr (kIndex > 0) {
        word = hn::ShiftRight<kIndex * kBits>(word);
      }
      if constexpr (kHigh > 0) {
        word = WithHighBits<kBits>(word, high[v]);
        high[v] = hn::RotateRight<kHigh>(high[v]);
      }
      codes[v] = numbers(word);
    }
    AddProducts(a, kIndex, codes, acc);
    AddCodes<Code, kCount, kIndex + 1>(numbers, low, high, a, acc);
  } else {
    (void)numbers, (void)low, (void)high, (void)a, (void)acc;
  }
}

// Adds the products of kCount codes of a piece, from code `index` on. `a`
// points to the columns of these codes.
template <class Code, int kCount, int kRows, int kVecs>
HWY_INLINE void TakeCodes(const KeyCodesArgs& args, const CodePlace& place,
                          const CodeNumbers<Code>& numbers, int64_t index,
                          int64_t column, const float* const (&a)[kRows],
                          Vec (&acc)[kRows][kVecs]) {
  constexpr int kBits = Code::kLowBits;
  constexpr int kHigh = Code::kHighBits;
  WordVec low[kVecs];
  WordVec high[kVecs];
  LoadBits<kCount * kBits>(args.planes[PlaneIndex(kBits)] + column,
                           place.low_bit + index * kBits, low);
  if constexpr (kHigh > 0) {
    LoadBits<kCount * kHigh>(args.planes[PlaneIndex(kHigh)] + column,
                             place.high_bit + index * kHigh, high);
    for (int v = 0; v < kVecs; ++v) {
      high[v] = hn::RotateRight<32 - kBits>(high[v]);
    }
  }
  AddCodes<Code, kCount, 0>(numbers, low, high, a, acc);
}

// How many codes are extracted at a time. In every plane, this many codes fill
// whole bytes.
template <class Code>
inline constexpr int kCodesAtOnce = Code::kLowBits == 8 ? 4 : 8;

template <class Code, int kRows, int kVecs>
HWY_INLINE void AddPiece(const KeyCodesArgs& args, const CodePiece& piece,
                         int64_t column, Vec (&acc)[kRows][kVecs]) {
  constexpr int64_t kAtOnce = kCodesAtOnce<Code>;
  const CodeNumbers<Code> numbers(args.levels);
  const float* a[kRows];
  for (int r = 0; r < kRows; ++r) {
    a[r] = args.a + r * args.a_stride + piece.begin - args.first;
  }
  const auto advance = [&a](int64_t count) {
    for (int r = 0; r < kRows; ++r) a[r] += count;
  };
  int64_t i = 0;
  for (; i + kAtOnce <= piece.width; i += kAtOnce, advance(kAtOnce)) {
    TakeCodes<Code, kAtOnce>(args, piece.in_chunk, numbers, i, column, a, acc);
  }
  for (; i < piece.width; ++i, advance(1)) {
    TakeCodes<Code, 1>(args, piece.in_chunk, numbers, i, column, a, acc);
  }
  // Prefetches half as many lines as the piece fills; LoadPlanes prefetched the
  // other half.
  args.ahead->Ask(LinesOf(piece.width * Code::kBits * kVecs * kVecLanes / 16));
}

// Adds the products of all pieces, one after another, while the sums stay in
// registers.
template <int kRows, bool kByLevel>
void KeyTile(const KeyCodesArgs& args, int64_t column) {
  constexpr int kVecs = kVecsOf<kRows>;
  Vec acc[kRows][kVecs];
  LoadSums(args.c + column, args.c_stride, args.accumulate, acc);
  for (int64_t p = 0; p < args.num_pieces; ++p) {
    const CodePiece& piece = args.pieces[p];
    switch (piece.place.bits()) {
      case 8:
        AddPiece<CodeKind<8, 0>>(args, piece, column, acc);
        break;
      case 6:
        AddPiece<CodeKind<4, 2>>(args, piece, column, acc);
        break;
      case 5:
        AddPiece<CodeKind<4, 1>>(args, piece, column, acc);
        break;
      case 4:
        AddPiece<CodeKind<4, 0, kByLevel>>(args, piece, column, acc);
        break;
      case 3:
        AddPiece<CodeKind<2, 1, kByLevel>>(args, piece, column, acc);
        break;
      case 2:
        AddPiece<CodeKind<2, 0, kByLevel>>(args, piece, column, acc);
        break;
      default:
        AddPiece<CodeKind<1, 0, kByLevel>>(args, piece, column, acc);
    }
  }
  StoreSums(acc, args.c + column, args.c_stride);
}

template <int kRows>
void KeyPairsTile(const KeyPairsArgs& args, int64_t column) {
  constexpr int kVecs = kVecsOf<kRows>;
  // Half as many lines as the words fill, because LoadPlanes prefetched the
  // other half.
  constexpr int kLinesPerWord = LinesOf(4 * kVecs * kVecLanes / 2);
  Vec acc[kRows][kVecs];
  LoadSums(args.c + column, args.c_stride, args.accumulate, acc);
  const uint32_t* words = args.words + column;
  const WordVec high_half = hn::Set(kWords, 0xffff0000u);
  for (int64_t i = 0; i < args.depth; i += 2, words += kSlots) {
    const float* a[kRows];
    for (int r = 0; r < kRows; ++r) a[r] = args.a + r * args.a_stride + i;
    Vec low[kVecs];
    Vec high[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      const WordVec pairs = hn::LoadU(kWords, words + v * kVecLanes);
      low[v] = hn::BitCast(kFloats, hn::ShiftLeft<16>(pairs));
      high[v] = hn::BitCast(kFloats, hn::And(pairs, high_half));
    }
    args.ahead->Ask(kLinesPerWord);
    AddProducts(a, 0, low, acc);
    if (i + 1 < args.depth) AddProducts(a, 1, high, acc);
  }
  StoreSums(acc, args.c + column, args.c_stride);
}

// ----- Values: a vector has several channels of one slot.

template <typename T>
HWY_INLINE T ReadWord(const char* from) {
  T word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

// Loads the codes of kVecLanes neighbouring channels of a slot. Sixteen 4-bit
// codes fill two 32-bit words; then even lanes get the codes of the first word,
// and odd lanes the codes of the second word.
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

  // Returns the codes in the lowest bits of each lane. The bits above them are
  // undefined.
  HWY_INLINE WordVec At(const char* from) const {
    return hn::Shr(Spread(from), shifts_);
  }

  // ToLanes converts a vector from the order of channels to the order of At's
  // lanes. FromLanes converts it back.
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

// Loads the kHigh high bits of codes whose kBits low bits SlotCodes loads: into
// the same lanes, shifted above the low bits.
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
  for (int r = 0; r < kRows; ++r) a[r] = args.a + r * kSlots;
  Vec acc[kRows][kVecs];
  LoadSums(c, args.c_stride, true, acc);
  ForEach<kRows * kVecs>([&](auto i) KVASIR_INLINE_LAMBDA {
    Vec& sum = acc[i / kVecs][i % kVecs];
    sum = SlotCodes<kBits>::ToLanes(sum);
  });
  for (int64_t s = 0; s < args.depth; ++s) {
    const char* slot = args.slots[s];
    Vec codes[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      WordVec word = low.At(slot + low_byte + v * SlotCodes<kBits>::kBytes);
      if constexpr (kHigh > 0) {
        word = WithHighBits<kBits>(
            word, high.At(slot + high_byte + v * HighBits::kBytes));
      }
      codes[v] = numbers(word);
    }
    AddProducts(a, s, codes, acc);
    if (s % kSlotsBetweenAsks == 0) args.ahead->Ask(kLines);
  }
  ForEach<kRows * kVecs>([&](auto i) KVASIR_INLINE_LAMBDA {
    Vec& sum = acc[i / kVecs][i % kVecs];
    sum = SlotCodes<kBits>::FromLanes(sum);
  });
  StoreSums(acc, c, args.c_stride);
}

#if HWY_TARGET <= HWY_AVX3
// Holds up to kBytes bytes of a slot in registers, from which LookUp picks
// 16-bit words by their index. Slots of up to 32 bytes are loaded as half a
// register, because such loads seldom cross a cache line.
template <int kBytes>
class SlotWindow {
 public:
  static_assert(kBytes == 32 || kBytes == 64 || kBytes == 128);

  // The masks ensure that Load reads no byte after the end of the slot.
  explicit SlotWindow(int64_t slot_bytes)
      : first_(MaskOf(slot_bytes)), second_(MaskOf(slot_bytes - 64)) {}

  HWY_INLINE void Load(const char* slot) {
    if constexpr (kBytes == 32) {
      low_ = _mm512_zextsi256_si512(
          _mm256_maskz_loadu_epi8(static_cast<__mmask32>(first_), slot));
    } else {
      low_ = _mm512_maskz_loadu_epi8(first_, slot);
    }
    if constexpr (kBytes == 128) {
      high_ = _mm512_maskz_loadu_epi8(second_, slot + 64);
    }
  }
  HWY_INLINE WordVec LookUp(WordVec words) const {
    if constexpr (kBytes == 128) {
      return WordVec{_mm512_permutex2var_epi16(low_, words.raw, high_)};
    } else {
      return WordVec{_mm512_permutexvar_epi16(words.raw, low_)};
    }
  }

 private:
  static __mmask64 MaskOf(int64_t bytes) {
    return bytes >= 64  ? ~__mmask64{0}
           : bytes <= 0 ? __mmask64{0}
                        : (__mmask64{1} << bytes) - 1;
  }

  __mmask64 first_;
  __mmask64 second_;
  __m512i low_;
  __m512i high_;
};
// Calls run(kBytes) with the kBytes of the smallest SlotWindow that holds
// `slot_bytes` bytes.
template <typename Run>
HWY_INLINE void ForWindow(int64_t slot_bytes, const Run& run) {
  if (slot_bytes <= 32) return run(std::integral_constant<int, 32>());
  if (slot_bytes <= 64) return run(std::integral_constant<int, 64>());
  run(std::integral_constant<int, 128>());
}

// Extracts the codes of 16 channels as described by CodeLanes.
class LaneReader {
 public:
  explicit LaneReader(const CodeLanes& lanes)
      : words_(hn::Load(kWords, lanes.words)),
        shifts_(hn::Load(kWords, lanes.shifts)),
        turns_(hn::Load(kWords, lanes.turns)),
        low_mask_(hn::Load(kWords, lanes.low_mask)),
        mask_(hn::Load(kWords, lanes.mask)) {}

  template <int kBytes>
  HWY_INLINE Vec At(const SlotWindow<kBytes>& slot) const {
    const hn::RebindToSigned<Floats> d32;
    const WordVec both = slot.LookUp(words_);
    const WordVec high{_mm512_rorv_epi32(both.raw, turns_.raw)};
    const WordVec code = SelectBits(low_mask_, hn::Shr(both, shifts_), high);
    return hn::ConvertTo(kFloats, hn::BitCast(d32, hn::And(code, mask_)));
  }

 private:
  WordVec words_;
  WordVec shifts_;
  WordVec turns_;
  WordVec low_mask_;
  WordVec mask_;
};

template <int kRows, int kBytes>
void LanesTile(const ValueLanesArgs& args, int64_t index) {
  constexpr int kVecs = kCodeTileVecs;
  const LaneReader first(args.lanes[index]);
  const LaneReader second(args.lanes[index + 1]);
  SlotWindow<kBytes> window(args.slot_bytes);
  float* const c = args.c + index * CodeLanes::kChannels;
  const float* a[kRows];
  for (int r = 0; r < kRows; ++r) a[r] = args.a + r * kSlots;
  Vec acc[kRows][kVecs];
  LoadSums(c, args.c_stride, true, acc);
  const int64_t depth = args.depth;
  constexpr int64_t kSlotsBetweenAsks = 16;
  const int64_t lines = kSlotsBetweenAsks * args.slot_bytes * kVecs /
                            (args.num_lanes * AheadLines::kLineBytes) +
                        1;
  for (int64_t s = 0; s < depth; ++s) {
    window.Load(args.slots[s]);
    const Vec codes[kVecs] = {first.At(window), second.At(window)};
    AddProducts(a, s, codes, acc);
    if (s % kSlotsBetweenAsks == 0) args.ahead->Ask(lines);
  }
  StoreSums(acc, c, args.c_stride);
}

template <int kBytes>
void UnpackLanesOf(const ValueLanesArgs& args, int64_t stride, float* to) {
  for (int64_t i = 0; i < args.num_lanes; ++i) {
    const LaneReader lanes(args.lanes[i]);
    SlotWindow<kBytes> window(args.slot_bytes);
    float* column = to + i * CodeLanes::kChannels;
    for (int64_t s = 0; s < args.depth; ++s, column += stride) {
      window.Load(args.slots[s]);
      hn::StoreU(lanes.At(window), kFloats, column);
    }
  }
  args.ahead->Ask(args.depth * args.slot_bytes / AheadLines::kLineBytes);
}

template <int kRows, int kBytes>
void LanesRow(int rows, const ValueLanesArgs& args) {
  if (rows == kRows) {
    for (int64_t i = 0; i < args.num_lanes; i += kCodeTileVecs) {
      LanesTile<kRows, kBytes>(args, i);
    }
  } else if constexpr (kRows > 1) {
    LanesRow<kRows - 1, kBytes>(rows, args);
  }
}
#endif

// Each 32-bit lane holds the bfloat16 numbers of an even and an odd channel,
// which are added to separate sums.
template <int kRows, int kVecs>
void PairsTile(const ValuePairsArgs& args, int64_t column) {
  constexpr int kPairs = kVecs / 2;
  constexpr int64_t kPairBytes = 4 * kVecLanes;
  float* const c = args.c + column;
  const char* from = args.slots + 2 * column;
  constexpr int kLines = LinesOf(kSlotsPerAsk * kPairs * kPairBytes);
  const float* a[kRows];
  for (int r = 0; r < kRows; ++r) a[r] = args.a + r * kSlots;
  Vec even[kRows][kPairs];
  Vec odd[kRows][kPairs];
  ForEach<kRows * kPairs>([&](auto i) KVASIR_INLINE_LAMBDA {
    constexpr int r = i / kPairs;
    constexpr int v = i % kPairs;
    hn::LoadInterleaved2(kFloats, c + r * args.c_stride + 2 * v * kVecLanes,
                         even[r][v], odd[r][v]);
  });
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
    AddProducts(a, s, low, even);
    AddProducts(a, s, high, odd);
    from += args.slot_bytes;
  }
  ForEach<kRows * kPairs>([&](auto i) KVASIR_INLINE_LAMBDA {
    constexpr int r = i / kPairs;
    constexpr int v = i % kPairs;
    hn::StoreInterleaved2(even[r][v], odd[r][v], kFloats,
                          c + r * args.c_stride + 2 * v * kVecLanes);
  });
}

// ----- Choice of a register tile.

template <int kRows, bool kByLevel>
void KeyRow(int rows, const KeyCodesArgs& args) {
  if (rows == kRows) {
    for (int64_t s = 0; s < kSlots; s += kVecsOf<kRows> * kVecLanes) {
      KeyTile<kRows, kByLevel>(args, s);
    }
  } else if constexpr (kRows > 1) {
    KeyRow<kRows - 1, kByLevel>(rows, args);
  }
}

template <int kRows>
void KeyPairsRow(int rows, const KeyPairsArgs& args) {
  if (rows == kRows) {
    for (int64_t s = 0; s < kSlots; s += kVecsOf<kRows> * kVecLanes) {
      KeyPairsTile<kRows>(args, s);
    }
  } else if constexpr (kRows > 1) {
    KeyPairsRow<kRows - 1>(rows, args);
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

// Computes the columns from `column` on, in register tiles that are as wide as
// the number of registers and the remaining columns allow.
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

// Divides the rows into register tiles of nearly equal height, and calls
// run(height, args) for each tile.
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

// Calls run(kind) with the CodeKind for codes of `bits` bits. kByLevel: whether
// codes are replaced by levels.
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
#if HWY_TARGET > HWY_AVX3  // AVX-512 looks up codes and levels in the same way
  if (levels != nullptr) return ForKind<true>(bits, run);
#endif
  (void)levels;
  return ForKind<false>(bits, run);
}

}  // namespace

void RunKeyCodes(int64_t rows, const KeyCodesArgs& args) {
  ForTiles(rows, args.a_stride, args, [](int height, const auto& tile) {
#if HWY_TARGET > HWY_AVX3  // AVX-512 looks up codes and levels in the same way
    if (tile.levels != nullptr) {
      return KeyRow<kCodeTileRows, true>(height, tile);
    }
#endif
    KeyRow<kCodeTileRows, false>(height, tile);
  });
}

void RunKeyPairs(int64_t rows, const KeyPairsArgs& args) {
  ForTiles(rows, args.a_stride, args, [](int height, const auto& tile) {
    KeyPairsRow<kCodeTileRows>(height, tile);
  });
}

void RunValueCodes(int64_t rows, const ValueCodesArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValueCodesArgs& tile) {
    ForKind(tile.place.bits(), tile.levels, [&](auto kind) {
      ValueRow<decltype(kind), kCodeTileRows>(height, tile);
    });
  });
}

#if HWY_TARGET <= HWY_AVX3
void RunValueLanes(int64_t rows, const ValueLanesArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValueLanesArgs& tile) {
    ForWindow(tile.slot_bytes, [&](auto bytes) {
      LanesRow<kCodeTileRows, bytes>(height, tile);
    });
  });
}

void UnpackLanes(const ValueLanesArgs& args, int64_t stride, float* to) {
  ForWindow(args.slot_bytes,
            [&](auto bytes) { UnpackLanesOf<bytes>(args, stride, to); });
}
#else
void RunValueLanes(int64_t, const ValueLanesArgs&) {}
void UnpackLanes(const ValueLanesArgs&, int64_t, float*) {}
#endif

void RunValuePairs(int64_t rows, const ValuePairsArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValuePairsArgs& tile) {
    PairsRow<kCodeTileRows>(height, tile);
  });
}

#else  // never called, because kTakesPairs is false
void RunKeyCodes(int64_t, const KeyCodesArgs&) {}
void RunKeyPairs(int64_t, const KeyPairsArgs&) {}
void RunValueLanes(int64_t, const ValueLanesArgs&) {}
void UnpackLanes(const ValueLanesArgs&, int64_t, float*) {}
void RunValueCodes(int64_t, const ValueCodesArgs&) {}
void RunValuePairs(int64_t, const ValuePairsArgs&) {}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();
