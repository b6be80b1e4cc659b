#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/cpu/pair_tile_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/cpu/pair_tile-inl.h"
#include "kernels/attention/cpu/tile_sums-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR
namespace {

// The number of vectors of columns in a register tile of kRows rows. A tile of
// few rows is wider, because otherwise it would have too few sums to hide the
// latency of multiply-adds.
template <int kRows>
inline constexpr int kVecsOf =
    2 * kPairTileVecs* kRows <= kPairTileSums ? 2 * kPairTileVecs
                                              : kPairTileVecs;

constexpr int LinesOf(int64_t bytes) {
  return static_cast<int>((bytes + AheadLines::kLineBytes - 1) /
                          AheadLines::kLineBytes);
}

// Sums of values prefetch at most once per this many slots, because each call
// of AheadLines::Ask takes time.
inline constexpr int64_t kSlotsPerAsk = 4;

// ----- Keys: a vector has one channel of several slots.

inline constexpr int64_t kSlots = 64;

template <int kRows>
void KeyPairsTile(const KeyPairsArgs& args, int64_t column) {
  constexpr int kVecs = kVecsOf<kRows>;
  // Prefetches half as many lines as the words fill. LoadPlanes has prefetched
  // the other half.
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

// Computes the columns from `column` on, in register tiles that are as wide as
// the number of registers and the remaining columns allow.
template <int kRows, int kVecs>
void PairsColumns(const ValuePairsArgs& args, int64_t column) {
  constexpr int64_t kColumns = kVecs * kVecLanes;
  if constexpr (kVecs == kPairTileVecs || kRows * kVecs <= kPairTileSums) {
    for (; column + kColumns <= args.columns; column += kColumns) {
      PairsTile<kRows, kVecs>(args, column);
    }
  }
  if constexpr (kVecs > kPairTileVecs) {
    if (column < args.columns) PairsColumns<kRows, kVecs / 2>(args, column);
  }
}

template <int kRows>
void PairsRow(int rows, const ValuePairsArgs& args) {
  if (rows == kRows) {
    PairsColumns<kRows, 4 * kPairTileVecs>(args, 0);
  } else if constexpr (kRows > 1) {
    PairsRow<kRows - 1>(rows, args);
  }
}

// Divides the rows into register tiles of nearly equal height, and calls
// run(height, args) for each tile.
template <typename Args, typename Run>
HWY_INLINE void ForTiles(int64_t rows, int64_t a_stride, const Args& args,
                         const Run& run) {
  if (rows <= kPairTileRows) return run(static_cast<int>(rows), args);
  Args tile = args;
  while (rows > 0) {
    const int64_t tiles = (rows + kPairTileRows - 1) / kPairTileRows;
    const int64_t height = rows / tiles;
    run(static_cast<int>(height), tile);
    tile.a += height * a_stride;
    tile.c += height * args.c_stride;
    rows -= height;
  }
}

}  // namespace

void RunKeyPairs(int64_t rows, const KeyPairsArgs& args) {
  ForTiles(rows, args.a_stride, args, [](int height, const auto& tile) {
    KeyPairsRow<kPairTileRows>(height, tile);
  });
}

void RunValuePairs(int64_t rows, const ValuePairsArgs& args) {
  ForTiles(rows, kSlots, args, [](int height, const ValuePairsArgs& tile) {
    PairsRow<kPairTileRows>(height, tile);
  });
}

#else  // never called, because kTakesPairs is false
void RunKeyPairs(int64_t, const KeyPairsArgs&) {}
void RunValuePairs(int64_t, const ValuePairsArgs&) {}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();
