#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels/attention/cpu/code_dots.h"

// Highway compiles the target AVX3_DL only on request. It has the VNNI
// instructions, which multiply bytes and add the products.
#define HWY_WANT_AVX3_DL 1
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/cpu/value_dots_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/cpu/code_bytes-inl.h"
#include "kernels/attention/cpu/tile_sums-inl.h"
#include "kernels/simd/simd-inl.h"
#include "kernels/simd/transpose-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kSlots = 64;
#if HWY_TARGET == HWY_SCALAR

void ValueDots(int64_t rows, const ValueDotsArgs& args) {
  for (int64_t r = 0; r < rows; ++r) {
    const WeightDigits& digits = args.digits[r];
    for (int64_t c = 0; c < args.width; ++c) {
      int32_t total = 0;
      for (int64_t s = args.begin; s < args.end; ++s) {
        const unsigned code = ReadCode(
            reinterpret_cast<const uint8_t*>(args.slots[s]), args.place, c);
        total += digits.At(s) * (args.levels != nullptr
                                     ? int32_t{args.levels[code]}
                                     : static_cast<int32_t>(code));
      }
      float& sum = args.c[r * args.c_stride + c];
      sum = std::fma(digits.unit, static_cast<float>(total), sum);
    }
  }
}

#else

// ----- Values: a 32-bit lane has four slots of one channel, which are 16 slots
// apart (WeightDigits).

constexpr int64_t kApart = kSlots / 4;
constexpr int64_t kVecBytes = 4 * kVecLanes;

// The addresses of the bytes that hold a piece's codes, for 64 slots. The low
// plane of a slot is read in columns of 16 bytes. A column fills one 128-bit
// block of a vector.
struct SlotBytes {
  const char* const* low;  // [64]
  int64_t low_begin;       // the byte of low[s] at which the piece begins
  const char* const* high;
  int64_t high_begin;
};

alignas(64) constexpr char kZeros[128 + 64] = {};

// Copies `count` bytes, from bit `bit` of `from` on, so that the first bit is
// the lowest bit of `to`. Bytes from `end` on are not read.
inline void CopyBits(const char* from, int64_t bit, int64_t count,
                     const char* end, char* to) {
  const char* const first = from + bit / 8;
  const auto shift = static_cast<unsigned>(bit % 8);
  if (shift == 0 && first + count <= end) {
    std::memcpy(to, first, static_cast<size_t>(count));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const auto at = [&](int64_t index) {
      return first + index < end
                 ? static_cast<unsigned>(static_cast<uint8_t>(first[index]))
                 : 0u;
    };
    to[i] = static_cast<char>((at(i) | at(i + 1) << 8) >> shift);
  }
}

// Finds the bytes of a piece of codes. Copies a plane if it does not begin at a
// whole byte, or if reads of whole columns would reach beyond args.room.
template <class Kind>
class SlotReader {
 public:
  // How many bytes of the high plane belong to 16 bytes of the low plane.
  static constexpr int64_t kHighBytes = Kind::kHighBits * 16 / Kind::kLowBits;

  // Each slot's low plane is read as columns [0, columns), in steps of
  // `columns_at_once`. A step reads 16 bytes of both planes for each of its
  // columns.
  SlotReader(const ValueDotsArgs& args, int columns_at_once) {
    const CodePlace& place = args.place;
    columns_ = ((args.width * Kind::kLowBits + 7) / 8 + 15) / 16;
    columns_ =
        (columns_ + columns_at_once - 1) / columns_at_once * columns_at_once;
    FindPlane(args, place.low_bit, Kind::kLowBits, 16 * columns_, low_,
              low_copy_, &found_.low, &found_.low_begin);
    if constexpr (Kind::kHighBits > 0) {
      FindPlane(
          args, place.high_bit, Kind::kHighBits,
          kHighBytes * (columns_ - columns_at_once) + 16 * columns_at_once,
          high_, high_copy_, &found_.high, &found_.high_begin);
    }
  }

  int64_t columns() const { return columns_; }
  const SlotBytes& found() const { return found_; }

 private:
  // The most bytes of a plane that are read.
  static constexpr int64_t kMostBytes = 128;

  // Finds the addresses of a plane whose codes begin at bit `bit` of each slot
  // and have `bits` bits. `read` bytes are read from each address.
  static void FindPlane(const ValueDotsArgs& args, int64_t bit, int bits,
                        int64_t read, const char** addresses, char* copies,
                        const char* const** found, int64_t* begin) {
    const bool in_place = bit % 8 == 0 && bit / 8 + read <= args.room;
    *found = args.slots;
    *begin = bit / 8;
    if (in_place && args.begin == 0 && args.end == kSlots) return;
    *found = addresses;
    *begin = 0;
    std::fill_n(addresses, kSlots, kZeros);
    const int64_t bytes = (args.width * bits + 7) / 8;
    const int64_t end = (bit + args.width * bits + 7) / 8;
    for (int64_t s = args.begin; s < args.end; ++s) {
      const char* const slot = args.slots[s];
      if (in_place) {
        addresses[s] = slot + bit / 8;
      } else {
        char* const copy = copies + s * kMostBytes;
        CopyBits(slot, bit, bytes, slot + end, copy);
        addresses[s] = copy;
      }
    }
  }

  SlotBytes found_;
  int64_t columns_;
  const char* low_[kSlots];
  const char* high_[Kind::kHighBits > 0 ? kSlots : 1];
  alignas(64) char low_copy_[kSlots * kMostBytes];
  alignas(64) char high_copy_[Kind::kHighBits > 0 ? kSlots* kMostBytes : 1];
};

// How a vector's 128-bit blocks are used. Quad q consists of the slots q, q +
// 16, q + 32 and q + 48. Each quad in the vector has kWide blocks, one for each
// of kWide neighbouring columns. A vector has kQuads neighbouring quads, so
// kSteps vectors cover all 64 slots.
template <int kWideBlocks>
struct Shape {
  static constexpr int kWide = kWideBlocks;
  static constexpr int kQuads = kBlocks / kWide;
  static constexpr int64_t kSteps = kApart / kQuads;
};

// Loads kWide columns, from byte `offset` on, of one slot of each of kQuads
// quads: slots[0], slots[1] and so on.
template <class Shape>
HWY_INLINE ByteVec LoadColumns(const char* const* slots, int64_t offset) {
  const auto at = [&](int quad) {
    return reinterpret_cast<const uint8_t*>(slots[quad] + offset);
  };
  if constexpr (Shape::kQuads == 1) {
    return hn::LoadU(kBytes, at(0));
  } else if constexpr (Shape::kQuads == 2) {
    const hn::Half<Bytes> half;
    return hn::Combine(kBytes, hn::LoadU(half, at(1)), hn::LoadU(half, at(0)));
  } else {
    const hn::Half<Bytes> half;
    const hn::Half<decltype(half)> quarter;
    const auto pair = [&](int quad) {
      return hn::Combine(half, hn::LoadU(quarter, at(quad + 1)),
                         hn::LoadU(quarter, at(quad)));
    };
    return hn::Combine(kBytes, pair(2), pair(0));
  }
}

// Loads the bytes of the high plane for the columns that LoadColumns loads from
// the low plane. Each block begins with the kHighBytes bytes of its column.
template <class Shape, int kHighBytes>
HWY_INLINE ByteVec LoadHigh(const char* const* slots, int64_t offset) {
  const ByteVec together = LoadColumns<Shape>(slots, offset);
  if constexpr (Shape::kWide == 1) return together;
  HWY_ALIGN static constexpr auto kFrom = [] {
    struct Table {
      int32_t lanes[kVecLanes];
    } table = {};
    for (int i = 0; i < kVecLanes; ++i) {
      const int quad = i / (4 * Shape::kWide);
      const int column = i / 4 % Shape::kWide;
      const int word = i % 4 < kHighBytes / 4 ? i % 4 : 0;
      table.lanes[i] = quad * 4 * Shape::kWide + column * kHighBytes / 4 + word;
    }
    return table;
  }();
  return AsBytes(hn::TableLookupLanes(
      AsWords(together), hn::SetTableIndices(kWords, kFrom.lanes)));
}

HWY_INLINE ByteVec LowerBytes(ByteVec a, ByteVec b) {
  return hn::InterleaveLower(kBytes, a, b);
}
HWY_INLINE WordVec LowerHalves(ByteVec a, ByteVec b) {
  return hn::BitCast(kWords,
                     hn::InterleaveLower(kHalves, hn::BitCast(kHalves, a),
                                         hn::BitCast(kHalves, b)));
}
HWY_INLINE WordVec UpperHalves(ByteVec a, ByteVec b) {
  return hn::BitCast(kWords,
                     hn::InterleaveUpper(kHalves, hn::BitCast(kHalves, a),
                                         hn::BitCast(kHalves, b)));
}

// Turns four vectors, one for each slot of the quads, into vectors whose 32-bit
// lanes have one byte of each of these slots. words[i] has bytes 4 i to 4 i + 3
// of each block.
HWY_INLINE void InterleaveSlots(const ByteVec (&slots)[4],
                                WordVec (&words)[4]) {
  const ByteVec low01 = LowerBytes(slots[0], slots[1]);
  const ByteVec low23 = LowerBytes(slots[2], slots[3]);
  const ByteVec high01 = hn::InterleaveUpper(kBytes, slots[0], slots[1]);
  const ByteVec high23 = hn::InterleaveUpper(kBytes, slots[2], slots[3]);
  words[0] = LowerHalves(low01, low23);
  words[1] = UpperHalves(low01, low23);
  words[2] = LowerHalves(high01, high23);
  words[3] = UpperHalves(high01, high23);
}

// Prepares the bits of the high plane for words[v] of InterleaveSlots. In each
// lane, the byte with the high bits of the lane's codes is selected, and these
// bits are moved to their place above the low bits. high[0] has bytes 0 to 3 of
// each column's part of the high plane, and high[1] has bytes 4 to 7.
template <class Kind, int kVec>
HWY_INLINE WordVec HighBits(const WordVec (&high)[2]) {
  // A byte of the high plane belongs to this many bytes of the low plane.
  constexpr int kShared = Kind::kLowBits / Kind::kHighBits;
  constexpr int kFirst = 4 * kVec / kShared;
  HWY_ALIGN static constexpr auto kLanes4 = [] {
    struct Table {
      uint8_t bytes[16];
    } table = {};
    for (int i = 0; i < 16; ++i) {
      const int word = (4 * kVec + i / 4) / kShared % 4;
      table.bytes[i] = static_cast<uint8_t>(4 * word + i % 4);
    }
    return table;
  }();
  HWY_ALIGN static constexpr auto kShifts = [] {
    struct Table {
      uint32_t words[kVecLanes];
    } table = {};
    for (int i = 0; i < kVecLanes; ++i) {
      table.words[i] = static_cast<uint32_t>(i % kShared * (8 / kShared));
    }
    return table;
  }();
  const ByteVec moved = hn::TableLookupBytes(
      AsBytes(high[kFirst / 4]), hn::LoadDup128(kBytes, kLanes4.bytes));
  const WordVec bits =
      hn::Shr(AsWords(moved), hn::LoadU(kWords, kShifts.words));
  // Keeps only the 8 / kShared high bits that belong to each byte. Otherwise
  // the shift would move other bits into the next byte.
  constexpr uint32_t kMask = 0x01010101u * ((1u << (8 / kShared)) - 1);
  return hn::ShiftLeft<Kind::kLowBits>(hn::And(bits, hn::Set(kWords, kMask)));
}

// Unpacks the codes of Shape::kWide columns, from `column` on, for the slots of
// step j. Calls visit(word, place, codes) for the 4 words and the places in a
// byte, with the codes as signed bytes. 128 is subtracted from codes of 8 bits,
// so that they are signed; AddTotals corrects the sums.
template <class Kind, class Shape, typename Visit>
HWY_INLINE void ForCodes(const SlotBytes& found, int64_t column, int64_t j,
                         ByteVec table, AheadLines* ahead, const Visit& visit) {
  constexpr int64_t kStepBytes = 16 * Shape::kWide;
  constexpr int64_t kHighBytes = SlotReader<Kind>::kHighBytes;
  const int64_t quad = Shape::kQuads * j;
  ByteVec slots[4];
  for (int i = 0; i < 4; ++i) {
    slots[i] = LoadColumns<Shape>(found.low + quad + kApart * i,
                                  found.low_begin + 16 * column);
  }
  WordVec words[4];
  InterleaveSlots(slots, words);
  WordVec high[2];
  if constexpr (Kind::kHighBits > 0) {
    for (int i = 0; i < 4; ++i) {
      slots[i] =
          LoadHigh<Shape, kHighBytes>(found.high + quad + kApart * i,
                                      found.high_begin + kHighBytes * column);
    }
    const ByteVec both01 = LowerBytes(slots[0], slots[1]);
    const ByteVec both23 = LowerBytes(slots[2], slots[3]);
    high[0] = LowerHalves(both01, both23);
    high[1] = UpperHalves(both01, both23);
  }
  ahead->Ask(LinesOf(4 * Shape::kQuads * kStepBytes *
                     (Kind::kLowBits + Kind::kHighBits) / Kind::kLowBits));
  ForEach<4>([&](auto v) KVASIR_INLINE_LAMBDA {
    WordVec above = words[v];
    if constexpr (Kind::kHighBits > 0) above = HighBits<Kind, v>(high);
    ForEach<Kind::kPerByte>([&](auto t) KVASIR_INLINE_LAMBDA {
      ByteVec codes = TakeCodes<Kind, t>(words[v], above, table);
      if constexpr (Kind::kLowBits == 8) {
        codes = hn::Xor(codes, hn::Set(kBytes, uint8_t{0x80}));
      }
      visit(v, t, codes);
    });
  });
}

// Writes the codes to `numbers`, which has Numbers [groups of Shape::kWide
// columns][4 words][places in a byte][kSteps].
template <class Kind, class Shape>
void UnpackValues(const SlotBytes& found, int64_t columns, ByteVec table,
                  uint8_t* numbers, AheadLines* ahead) {
  constexpr int kPlaces = Kind::kPerByte;
  for (int64_t column = 0; column < columns; column += Shape::kWide) {
    uint8_t* to = numbers + column / Shape::kWide * 4 * kPlaces *
                                Shape::kSteps * kNumbersBytes;
    for (int64_t j = 0; j < Shape::kSteps; ++j, to += kNumbersBytes) {
      ForCodes<Kind, Shape>(
          found, column, j, table, ahead,
          [&](auto v, auto t, ByteVec codes) KVASIR_INLINE_LAMBDA {
            StoreNumbers(
                SignedNumbers(codes),
                to + (v * kPlaces + t) * Shape::kSteps * kNumbersBytes);
          });
    }
  }
}

// The digits of a row's weights in the form that DigitSums needs: 32-bit word q
// of both belongs to quad q.
struct RowWords {
  const uint8_t* first;
  const uint8_t* second;
};
// Returns the words of a row. If digits are bytes, writes them to `memory`
// [128].
HWY_INLINE RowWords WordsOf(const WeightDigits& digits, uint8_t* memory) {
  if constexpr (!kDigitsAreBytes) {
    (void)memory;
    return {reinterpret_cast<const uint8_t*>(digits.even),
            reinterpret_cast<const uint8_t*>(digits.odd)};
  } else {
    const RowWords words = {memory, memory + kSlots};
    const auto seven_bits = hn::Set(kWords, 0x007f007fu);
    for (int64_t q = 0; q < kApart; q += kVecLanes) {
      const WordVec even = hn::LoadU(kWords, digits.even + q);
      const WordVec odd = hn::LoadU(kWords, digits.odd + q);
      const auto store = [&](WordVec even_digits, WordVec odd_digits,
                             uint8_t* to) {
        hn::StoreU(
            AsBytes(hn::Or(hn::And(even_digits, seven_bits),
                           hn::ShiftLeft<8>(hn::And(odd_digits, seven_bits)))),
            kBytes, to + 4 * q);
      };
      store(hn::ShiftRight<kDigitBits>(even), hn::ShiftRight<kDigitBits>(odd),
            memory);
      store(even, odd, memory + kSlots);
    }
    return words;
  }
}

// Loads words of weights for the quads of step j: each lane gets the word of
// its quad.
template <class Shape>
HWY_INLINE ByteVec LoadWeights(const uint8_t* words, int64_t j) {
  if constexpr (Shape::kQuads == 1) {
    uint32_t word;
    std::memcpy(&word, words + 4 * j, sizeof(word));
    return AsBytes(hn::Set(kWords, word));
  } else {
    HWY_ALIGN static constexpr auto kQuadOfLane = [] {
      struct Table {
        int32_t lanes[kVecLanes];
      } table = {};
      for (int i = 0; i < kVecLanes; ++i) table.lanes[i] = i / 4 / Shape::kWide;
      return table;
    }();
    const auto quads = hn::SetTableIndices(kWords, kQuadOfLane.lanes);
    if constexpr (Shape::kQuads == 2) {
      uint64_t two;
      std::memcpy(&two, words + 8 * j, sizeof(two));
      const auto pairs = hn::Set(hn::Repartition<uint64_t, Words>(), two);
      return AsBytes(hn::TableLookupLanes(hn::BitCast(kWords, pairs), quads));
    } else {
      const ByteVec four = hn::LoadDup128(kBytes, words + 16 * j);
      return AsBytes(hn::TableLookupLanes(AsWords(four), quads));
    }
  }
}

// Writes the words of all steps, as LoadWeights returns them, to `memory`. A
// row that is multiplied by many vectors of codes then needs one load for each.
template <class Shape>
HWY_INLINE const uint8_t* SpreadWeights(const uint8_t* words, uint8_t* memory) {
  if constexpr (Shape::kQuads == 1) return words;
  for (int64_t j = 0; j < Shape::kSteps; ++j) {
    hn::StoreU(LoadWeights<Shape>(words, j), kBytes, memory + j * kVecBytes);
  }
  return memory;
}
template <class Shape>
HWY_INLINE ByteVec LoadSpread(const uint8_t* weights, int64_t j) {
  if constexpr (Shape::kQuads == 1) return LoadWeights<Shape>(weights, j);
  return hn::LoadU(kBytes, weights + j * kVecBytes);
}

// Writes the sums over all slots, one vector.
template <class Shape>
HWY_INLINE void StoreTotal(const DigitSums& sums, int32_t* to) {
  IntVec total = sums.Total();
  if constexpr (Shape::kQuads > 1) {
    total = hn::Add(total, hn::ConcatLowerUpper(kInts, total, total));
  }
  if constexpr (Shape::kQuads > 2) {
    total = hn::Add(total, hn::SwapAdjacentBlocks(total));
  }
  hn::StoreU(total, kInts, to);
}

// Multiplies kNumbers neighbouring entries of `numbers`, which have kSteps
// Numbers each, by the spread weights of kRows rows. Writes the sums over all
// slots to `totals`, one vector for each entry, rows totals_stride apart.
template <class Shape, int kRows, int kNumbers>
HWY_INLINE void MultiplyNumbers(const uint8_t* numbers, const RowWords* weights,
                                int32_t* totals, int64_t totals_stride) {
  DigitSums sums[kRows][kNumbers];
  for (int64_t j = 0; j < Shape::kSteps; ++j) {
    Numbers codes[kNumbers];
    ForEach<kNumbers>([&](auto n) KVASIR_INLINE_LAMBDA {
      codes[n] = LoadNumbers(numbers + (n * Shape::kSteps + j) * kNumbersBytes);
    });
    ForEach<kRows>([&](auto r) KVASIR_INLINE_LAMBDA {
      const ByteVec first = LoadSpread<Shape>(weights[r].first, j);
      const ByteVec second = LoadSpread<Shape>(weights[r].second, j);
      ForEach<kNumbers>([&](auto n) KVASIR_INLINE_LAMBDA {
        sums[r][n].AddSigned(codes[n], first, second);
      });
    });
  }
  ForEach<kRows * kNumbers>([&](auto i) KVASIR_INLINE_LAMBDA {
    StoreTotal<Shape>(
        sums[i / kNumbers][i % kNumbers],
        totals + i / kNumbers * totals_stride + i % kNumbers * kVecLanes);
  });
}

// Like UnpackValues and MultiplyAll for one row. The codes stay in registers.
template <class Kind, class Shape>
void MultiplyOneRow(const SlotBytes& found, int64_t columns, ByteVec table,
                    const RowWords& weights, int32_t* totals,
                    AheadLines* ahead) {
  constexpr int kSums = 4 * Kind::kPerByte;
  for (int64_t column = 0; column < columns; column += Shape::kWide) {
    DigitSums sums[kSums];
    for (int64_t j = 0; j < Shape::kSteps; ++j) {
      const ByteVec first = LoadWeights<Shape>(weights.first, j);
      const ByteVec second = LoadWeights<Shape>(weights.second, j);
      ForCodes<Kind, Shape>(found, column, j, table, ahead,
                            [&](auto v, auto t, ByteVec codes)
                                KVASIR_INLINE_LAMBDA {
                                  sums[v * Kind::kPerByte + t].AddSigned(
                                      SignedNumbers(codes), first, second);
                                });
    }
    ForEach<kSums>([&](auto i) KVASIR_INLINE_LAMBDA {
      StoreTotal<Shape>(sums[i], totals + i * kVecLanes);
    });
    totals += kSums * kVecLanes;
  }
}

// Converts a vector of sums to float32 and adds it to its channels:
// c[i] = fma(unit, sums[i], c[i]), for the first `count` lanes.
HWY_INLINE void AddSums(float unit, WordVec sums, int64_t count, float* c) {
  const Vec floats = hn::ConvertTo(kFloats, hn::BitCast(kInts, sums));
  if (count >= kVecLanes) {
    hn::StoreU(Fma(Broadcast(unit), floats, LoadFloats(c)), kFloats, c);
    return;
  }
  HWY_ALIGN float lanes[kVecLanes];
  hn::Store(floats, kFloats, lanes);
  for (int64_t i = 0; i < count; ++i) c[i] = std::fma(unit, lanes[i], c[i]);
}

// Block b of sums[k] has four channels of column b, and the next four are in
// sums[k + 1]. Writes vectors of neighbouring channels of a column to `merged`,
// one for each column of the shape.
template <class Shape>
HWY_INLINE void MergeBlocks(const WordVec* sums,
                            WordVec (&merged)[Shape::kWide]) {
  if constexpr (kBlocks == 1) {
    merged[0] = sums[0];
  } else {
    const auto even = [&](int k) {
      return hn::OddEvenBlocks(hn::SwapAdjacentBlocks(sums[k + 1]), sums[k]);
    };
    const auto odd = [&](int k) {
      return hn::OddEvenBlocks(sums[k + 1], hn::SwapAdjacentBlocks(sums[k]));
    };
    if constexpr (kBlocks == 2) {
      merged[0] = even(0);
      if constexpr (Shape::kWide > 1) merged[1] = odd(0);
    } else {
      merged[0] = hn::ConcatLowerLower(kWords, even(2), even(0));
      if constexpr (Shape::kWide > 1) {
        merged[1] = hn::ConcatLowerLower(kWords, odd(2), odd(0));
      }
      if constexpr (Shape::kWide > 2) {
        merged[2] = hn::ConcatUpperUpper(kWords, even(2), even(0));
        merged[3] = hn::ConcatUpperUpper(kWords, odd(2), odd(0));
      }
    }
  }
}

// Adds the sums of one row to its channels. Channel (16 * column + byte) *
// kPerByte + place has its sum in the vector for word byte / 4 and for `place`.
template <class Kind, class Shape>
void AddTotals(const int32_t* totals, int64_t columns, int64_t width,
               const WeightDigits& digits, float* c) {
  constexpr int kPlaces = Kind::kPerByte;
  constexpr int kTogether = kPlaces < 4 ? kPlaces : 4;
  // Every iteration orders the sums of kTaken words, so that sums[k] has
  // channels 4 k to 4 k + 3 of these words.
  constexpr int kTaken = kPlaces < 4 ? 4 / kPlaces : 1;
  const IntVec offset =
      hn::Set(kInts, Kind::kLowBits == 8 ? 128 * digits.sum : 0);
  for (int64_t column = 0; column < columns; column += Shape::kWide) {
    for (int word = 0; word < 4; word += kTaken) {
      WordVec sums[kTaken * kPlaces];
      ForEach<kTaken>([&](auto w) KVASIR_INLINE_LAMBDA {
        ForEach<kPlaces / kTogether>([&](auto part) KVASIR_INLINE_LAMBDA {
          const int32_t* from =
              totals + ((column / Shape::kWide * 4 + word + w) * kPlaces +
                        part * kTogether) *
                           kVecLanes;
          WordVec own[4];
          for (int i = 0; i < kTogether; ++i) {
            IntVec sum = hn::LoadU(kInts, from + i * kVecLanes);
            if constexpr (Kind::kLowBits == 8) sum = hn::Add(sum, offset);
            own[i] = hn::BitCast(kWords, sum);
          }
          if constexpr (kTogether == 2) {
            const WordVec lower = hn::InterleaveLower(kWords, own[0], own[1]);
            own[1] = hn::InterleaveUpper(kWords, own[0], own[1]);
            own[0] = lower;
          } else if constexpr (kTogether == 4) {
            TransposeBlocksOf4(own);
          }
          for (int i = 0; i < kTogether; ++i) {
            sums[w * kPlaces + i * (kPlaces / kTogether) + part] = own[i];
          }
        });
      });
      ForEach<kTaken * kPlaces / kBlocks>([&](auto set) KVASIR_INLINE_LAMBDA {
        WordVec merged[Shape::kWide];
        MergeBlocks<Shape>(sums + set * kBlocks, merged);
        for (int block = 0; block < Shape::kWide; ++block) {
          const int64_t channel =
              (16 * (column + block) + 4 * word) * kPlaces + set * kVecLanes;
          AddSums(digits.unit, merged[block], width - channel, c + channel);
        }
      });
    }
  }
}

// Computes kRows rows, kNumbers vectors at a time, from vector `from` on.
template <class Shape, int kRows, int kNumbers>
void MultiplyAll(const uint8_t* numbers, int64_t from, int64_t vectors,
                 const RowWords* weights, int32_t* totals,
                 int64_t totals_stride) {
  constexpr int64_t kBytesEach = Shape::kSteps * kNumbersBytes;
  for (; from + kNumbers <= vectors; from += kNumbers) {
    MultiplyNumbers<Shape, kRows, kNumbers>(numbers + from * kBytesEach,
                                            weights, totals + from * kVecLanes,
                                            totals_stride);
  }
  if constexpr (kNumbers > 1) {
    if (from < vectors) {
      MultiplyAll<Shape, kRows, kNumbers / 2>(numbers, from, vectors, weights,
                                              totals, totals_stride);
    }
  }
}

template <class Kind, class Shape>
void ValueTiles(int64_t rows, const ValueDotsArgs& args) {
  const SlotReader<Kind> reader(args, Shape::kWide);
  const int64_t columns = reader.columns();
  const ByteVec table = LevelTable(args.levels, 0);
  constexpr int64_t kMostTotals = 8 * 16 * kBlocks;
  HWY_ALIGN int32_t totals[4][kMostTotals];
  HWY_ALIGN uint8_t memory[4][2 * kSlots];
  const auto add = [&](int64_t row, const int32_t* sums) {
    AddTotals<Kind, Shape>(sums, columns, args.width, args.digits[row],
                           args.c + row * args.c_stride);
  };
  // With more places than two, the sums of a row would not fit into registers.
  if constexpr (!kSmallTiles && Kind::kPerByte <= 2) {
    if (rows == 1) {
      MultiplyOneRow<Kind, Shape>(reader.found(), columns, table,
                                  WordsOf(args.digits[0], memory[0]), totals[0],
                                  args.ahead);
      return add(0, totals[0]);
    }
  }
  auto* const numbers = reinterpret_cast<uint8_t*>(args.numbers);
  UnpackValues<Kind, Shape>(reader.found(), columns, table, numbers,
                            args.ahead);
  const int64_t vectors = columns / Shape::kWide * 4 * Kind::kPerByte;
  HWY_ALIGN uint8_t spread[4][2][Shape::kSteps * kVecBytes];
  ForTiles<kDotRows>(rows, [&](auto height, int64_t row) {
    RowWords weights[height];
    for (int r = 0; r < height; ++r) {
      const RowWords words = WordsOf(args.digits[row + r], memory[r]);
      weights[r] = {SpreadWeights<Shape>(words.first, spread[r][0]),
                    SpreadWeights<Shape>(words.second, spread[r][1])};
    }
    MultiplyAll<Shape, height, kDotSums / height>(numbers, 0, vectors, weights,
                                                  totals[0], kMostTotals);
    for (int r = 0; r < height; ++r) add(row + r, totals[r]);
  });
}

void ValueDots(int64_t rows, const ValueDotsArgs& args) {
  ForKind(args.place, args.levels != nullptr, [&](auto kind) {
    using Kind = decltype(kind);
    const int64_t bytes = (args.width * Kind::kLowBits + 7) / 8;
    if constexpr (kBlocks >= 4) {
      if (bytes > 32) return ValueTiles<Kind, Shape<4>>(rows, args);
    }
    if constexpr (kBlocks >= 2) {
      if (bytes > 16) return ValueTiles<Kind, Shape<2>>(rows, args);
    }
    ValueTiles<Kind, Shape<1>>(rows, args);
  });
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {

HWY_EXPORT(ValueDots);

void RunValueDots(int64_t rows, const ValueDotsArgs& args) {
  HWY_DYNAMIC_DISPATCH(ValueDots)(rows, args);
}

}  // namespace kvasir::kernels
#endif
