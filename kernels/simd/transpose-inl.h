// Transposes the rows of cached slots (numbers of 16 or 32 bits) and converts
// them to float32, so that the numbers of neighbouring slots for one channel
// are adjacent. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_TRANSPOSE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_TRANSPOSE_INL_H_
#undef KVASIR_KERNELS_TRANSPOSE_INL_H_
#else
#define KVASIR_KERNELS_TRANSPOSE_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "kernels/simd/ahead_lines.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// In each 128-bit block, transposes the 4 x 4 words that rows[0] to rows[3]
// have there.
#if HWY_TARGET != HWY_SCALAR
HWY_INLINE void TransposeBlocksOf4(WordVec* rows) {
  const hn::Repartition<uint64_t, Words> d64;
  const auto wide = [&](WordVec v) { return hn::BitCast(d64, v); };
  const WordVec low01 = hn::InterleaveLower(kWords, rows[0], rows[1]);
  const WordVec high01 = hn::InterleaveUpper(kWords, rows[0], rows[1]);
  const WordVec low23 = hn::InterleaveLower(kWords, rows[2], rows[3]);
  const WordVec high23 = hn::InterleaveUpper(kWords, rows[2], rows[3]);
  rows[0] =
      hn::BitCast(kWords, hn::InterleaveLower(d64, wide(low01), wide(low23)));
  rows[1] =
      hn::BitCast(kWords, hn::InterleaveUpper(d64, wide(low01), wide(low23)));
  rows[2] =
      hn::BitCast(kWords, hn::InterleaveLower(d64, wide(high01), wide(high23)));
  rows[3] =
      hn::BitCast(kWords, hn::InterleaveUpper(d64, wide(high01), wide(high23)));
}
#endif

// Exchanges lane j of rows[i] with lane i of rows[j].
HWY_INLINE void Transpose(WordVec* rows) {
#if HWY_TARGET == HWY_SCALAR
  (void)rows;
#else
  for (int i = 0; i < kVecLanes; i += 4) TransposeBlocksOf4(rows + i);
  // Now block b of rows[4 i + j] has column 4 b + j of rows 4 i .. 4 i + 3.
  if constexpr (kVecLanes == 8) {
    for (int j = 0; j < 4; ++j) {
      const WordVec first = rows[j];
      const WordVec second = rows[4 + j];
      rows[j] = hn::ConcatLowerLower(kWords, second, first);
      rows[4 + j] = hn::ConcatUpperUpper(kWords, second, first);
    }
  } else if constexpr (kVecLanes == 16) {
    for (int j = 0; j < 4; ++j) {
      const WordVec a = rows[j];
      const WordVec b = rows[4 + j];
      const WordVec c = rows[8 + j];
      const WordVec d = rows[12 + j];
      const WordVec ac_low = hn::ConcatLowerLower(kWords, c, a);
      const WordVec ac_high = hn::ConcatUpperUpper(kWords, c, a);
      const WordVec bd_low = hn::ConcatLowerLower(kWords, d, b);
      const WordVec bd_high = hn::ConcatUpperUpper(kWords, d, b);
      rows[j] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(bd_low), ac_low);
      rows[4 + j] = hn::OddEvenBlocks(bd_low, hn::SwapAdjacentBlocks(ac_low));
      rows[8 + j] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(bd_high), ac_high);
      rows[12 + j] =
          hn::OddEvenBlocks(bd_high, hn::SwapAdjacentBlocks(ac_high));
    }
  }
#endif
}

// Sets rows[i] = first + i * stride for `count` rows. Written with vectors,
// because compilers need several instructions for each address.
inline void FillRows(const char* first, int64_t stride, int64_t count,
                     const char** rows) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  static_assert(sizeof(first) == sizeof(uint64_t), "pointers have 64 bits");
  const hn::Repartition<uint64_t, Words> d64;
  constexpr int64_t kAtOnce = kVecLanes / 2;
  if (count >= 2 * kAtOnce) {
    for (; i < kAtOnce; ++i) rows[i] = first + i * stride;
    const auto step = hn::Set(d64, static_cast<uint64_t>(stride * kAtOnce));
    auto* const bits = reinterpret_cast<uint64_t*>(rows);
    auto addresses = hn::LoadU(d64, bits);
    for (; i + kAtOnce <= count; i += kAtOnce) {
      addresses = hn::Add(addresses, step);
      hn::StoreU(addresses, d64, bits + i);
    }
  }
#endif
  for (; i < count; ++i) rows[i] = first + i * stride;
}

// Sets out[i * out_stride + s] to number `first + i` of row s, for all i and s
// below kVecLanes.
template <typename T>
HWY_INLINE void TransposeNumbers(const char* const* rows, int64_t first,
                                 float* out, int64_t out_stride,
                                 AheadLines* ahead) {
  WordVec lanes[kVecLanes];
  for (int s = 0; s < kVecLanes; ++s) {
    const T* row = reinterpret_cast<const T*>(rows[s]) + first;
    lanes[s] = hn::BitCast(kWords, LoadFloats(row));
    if (ahead != nullptr) ahead->Ask();
  }
  Transpose(lanes);
  for (int i = 0; i < kVecLanes; ++i) {
    hn::StoreU(hn::BitCast(kFloats, lanes[i]), kFloats, out + i * out_stride);
  }
}

// Like TransposeNumbers, for twice as many bfloat16 numbers of each row. Moves
// pairs of numbers as 32-bit words and separates them afterwards, which halves
// the number of moves.
HWY_INLINE void TransposeBf16Pairs(const char* const* rows, int64_t first,
                                   float* out, int64_t out_stride,
                                   AheadLines* ahead) {
  WordVec lanes[kVecLanes];
  for (int s = 0; s < kVecLanes; ++s) {
    lanes[s] = hn::LoadU(
        kWords, reinterpret_cast<const uint32_t*>(rows[s] + 2 * first));
    if (ahead != nullptr) ahead->Ask();
  }
  Transpose(lanes);
  const WordVec high_half = hn::Set(kWords, 0xffff0000u);
  for (int i = 0; i < kVecLanes; ++i) {
    const WordVec even = hn::ShiftLeft<16>(lanes[i]);
    const WordVec odd = hn::And(lanes[i], high_half);
    hn::StoreU(hn::BitCast(kFloats, even), kFloats, out + 2 * i * out_stride);
    hn::StoreU(hn::BitCast(kFloats, odd), kFloats,
               out + (2 * i + 1) * out_stride);
  }
}

// Sets out[i * num_rows + s] to number i of row s. num_rows is a multiple of
// kVecLanes. If `ahead` is not null, prefetches one of its lines for each
// vector that is read.
template <typename T>
void TransposeRows(const char* const* rows, int64_t num_rows, int64_t width,
                   float* out, AheadLines* ahead = nullptr) {
  for (int64_t s = 0; s < num_rows; s += kVecLanes) {
    int64_t i = 0;
    if constexpr (sizeof(T) == 2 && DTypeOf<T>::kValue == DType::kBf16) {
      for (; i + 2 * kVecLanes <= width; i += 2 * kVecLanes) {
        TransposeBf16Pairs(rows + s, i, out + i * num_rows + s, num_rows,
                           ahead);
      }
    }
    for (; i + kVecLanes <= width; i += kVecLanes) {
      TransposeNumbers<T>(rows + s, i, out + i * num_rows + s, num_rows, ahead);
    }
    for (; i < width; ++i) {
      for (int64_t lane = s; lane < s + kVecLanes; ++lane) {
        out[i * num_rows + lane] =
            ToFloat(reinterpret_cast<const T*>(rows[lane])[i]);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_TRANSPOSE_INL_H_
