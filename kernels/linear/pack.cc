// PackRows transposes rows into panels, 32 columns at a time, and only copies
// them for the layout kRows. For PackAsTheyLie it is the other way round.
#include "kernels/linear/pack.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/linear/pack.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

#ifndef KVASIR_KERNELS_PACK_ONCE_
#define KVASIR_KERNELS_PACK_ONCE_
namespace kvasir::kernels {

// Packing handles this many k at a time, for all columns of a panel. The cache
// lines that it reads then stay in the first-level cache until all of their
// numbers are packed.
inline constexpr int64_t kPackBlockK = 64;

// Returns a mask of the exponent bits. A number is infinite or NaN if all of
// these bits are set.
inline uint32_t ExponentBits(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return 0x7c00;
    case DType::kBf16:
      return 0x7f80;
    case DType::kF32:
      break;
  }
  return 0x7f800000;
}

}  // namespace kvasir::kernels
#endif

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

#if HWY_TARGET == HWY_SCALAR
template <typename T>
inline constexpr int64_t kSquare = 1;

template <typename T>
void TransposeSquare(const T* from, T* to) {
  to[0] = from[0];
}
#else
// The side of the squares that are transposed in registers: the number of
// elements in a vector of 128 bits. Wider vectors would not help, because the
// speed of memory limits packing.
template <typename T>
inline constexpr int64_t kSquare = 16 / static_cast<int64_t>(sizeof(T));

// Transposes a square: to[i][c] = from[c][i].
template <typename T>
void TransposeSquare(const T* from, T* to) {
  constexpr int64_t kSide = kSquare<T>;
  const hn::FixedTag<T, static_cast<size_t>(kSide)> tag;
  hn::Vec<decltype(tag)> rows[kSide];
  for (int64_t c = 0; c < kSide; ++c) {
    rows[c] = hn::LoadU(tag, from + c * kPackBlockK);
  }
  // Each round interleaves the first half of all numbers with the second half
  // (a perfect shuffle). After log2(kSide) rounds, the square is transposed.
  for (int64_t round = 1; round < kSide; round *= 2) {
    hn::Vec<decltype(tag)> next[kSide];
    for (int64_t c = 0; c < kSide / 2; ++c) {
      next[2 * c] = hn::InterleaveLower(tag, rows[c], rows[c + kSide / 2]);
      next[2 * c + 1] = hn::InterleaveUpper(tag, rows[c], rows[c + kSide / 2]);
    }
    for (int64_t c = 0; c < kSide; ++c) rows[c] = next[c];
  }
  for (int64_t i = 0; i < kSide; ++i) {
    hn::StoreU(rows[i], tag, to + i * kPanelColumns);
  }
}
#endif

// Writes `depth` lines of a panel. Line i receives staged[c][i] for each column
// c below `count`.
template <typename T>
void TransposeStaged(const T* staged, int64_t count, int64_t depth, T* to) {
  constexpr int64_t kSide = kSquare<T>;
  const int64_t square_count = count / kSide * kSide;
  const int64_t square_depth = depth / kSide * kSide;
  for (int64_t i = 0; i < square_depth; i += kSide) {
    for (int64_t c = 0; c < square_count; c += kSide) {
      TransposeSquare(staged + c * kPackBlockK + i, to + i * kPanelColumns + c);
    }
  }
  for (int64_t i = 0; i < depth; ++i) {
    for (int64_t c = i < square_depth ? square_count : 0; c < count; ++c) {
      to[i * kPanelColumns + c] = staged[c * kPackBlockK + i];
    }
  }
}

void TransposeStaged16(const uint16_t* staged, int64_t count, int64_t depth,
                       uint16_t* to) {
  TransposeStaged(staged, count, depth, to);
}
void TransposeStaged32(const uint32_t* staged, int64_t count, int64_t depth,
                       uint32_t* to) {
  TransposeStaged(staged, count, depth, to);
}

// Returns whether any of `count` numbers has all of these bits set. `count` is
// a multiple of the numbers in four vectors.
template <typename T>
bool AnyHas(const char* numbers, int64_t count, T bits) {
  const hn::ScalableTag<T> tag;
  const auto wanted = hn::Set(tag, bits);
  auto most = hn::Zero(tag);
  const auto step = static_cast<int64_t>(hn::Lanes(tag));
  for (int64_t i = 0; i < count; i += 4 * step) {
    T unaligned[4 * hn::MaxLanes(tag)];
    std::memcpy(unaligned, numbers + i * static_cast<int64_t>(sizeof(T)),
                sizeof(unaligned));
    for (int64_t v = 0; v < 4; ++v) {
      most =
          hn::Max(most, hn::And(hn::LoadU(tag, unaligned + v * step), wanted));
    }
  }
  return !hn::AllFalse(tag, hn::Eq(most, wanted));
}

bool AnyHas16(const char* numbers, int64_t count, uint32_t bits) {
  return AnyHas(numbers, count, static_cast<uint16_t>(bits));
}
bool AnyHas32(const char* numbers, int64_t count, uint32_t bits) {
  return AnyHas(numbers, count, bits);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {

HWY_EXPORT(TransposeStaged16);
HWY_EXPORT(TransposeStaged32);
HWY_EXPORT(AnyHas16);
HWY_EXPORT(AnyHas32);

// How many numbers are checked together. They fill whole vectors on
// every target.
constexpr int64_t kFiniteBlock = 1024;

template <typename T>
void PackPanelPart(const char* rows, int64_t row_stride_bytes, int64_t k,
                   int64_t count, T* panel) {
  for (int64_t k0 = 0; k0 < k; k0 += kPackBlockK) {
    const int64_t k1 = std::min(k, k0 + kPackBlockK);
    T staged[kPanelColumns][kPackBlockK];
    for (int64_t c = 0; c < count; ++c) {
      std::memcpy(
          staged[c],
          rows + c * row_stride_bytes + k0 * static_cast<int64_t>(sizeof(T)),
          static_cast<size_t>(k1 - k0) * sizeof(T));
    }
    T* lines = panel + k0 * kPanelColumns;
    if constexpr (sizeof(T) == 2) {
      HWY_DYNAMIC_DISPATCH(TransposeStaged16)
      (staged[0], count, k1 - k0, lines);
    } else {
      HWY_DYNAMIC_DISPATCH(TransposeStaged32)
      (staged[0], count, k1 - k0, lines);
    }
  }
}

template <typename T>
void Pack(const PackedMatrix& shape, const RowBlock& block, int64_t first,
          T* memory) {
  const int64_t row_bytes = block.row_stride * static_cast<int64_t>(sizeof(T));
  int64_t row = 0;
  while (row < block.num_rows) {
    const int64_t column = first + row;
    const int64_t in_panel = column % kPanelColumns;
    const int64_t count =
        std::min(block.num_rows - row, kPanelColumns - in_panel);
    T* panel =
        memory + column / kPanelColumns * shape.k * kPanelColumns + in_panel;
    PackPanelPart(static_cast<const char*>(block.data) + row * row_bytes,
                  row_bytes, shape.k, count, panel);
    row += count;
  }
}

// Copies rows for the layout kRows. Each row of the block is a column of W in
// `memory`.
void CopyRows(const PackedMatrix& shape, const RowBlock& block, int64_t first,
              char* memory) {
  const int64_t width = DTypeBytes(shape.dtype);
  for (int64_t i = 0; i < block.num_rows; ++i) {
    std::memcpy(
        memory + (first + i) * shape.k * width,
        static_cast<const char*>(block.data) + i * block.row_stride * width,
        static_cast<size_t>(shape.k * width));
  }
}

// Transposes for the layout kRows: to[n][first + i] = block[i][n]. Works in
// squares, so that each written cache line is soon full.
template <typename T>
void TransposeRows(const PackedMatrix& shape, const RowBlock& block,
                   int64_t first, T* to) {
  constexpr int64_t kSide = 64;
  const auto* const from = static_cast<const char*>(block.data);
  for (int64_t i0 = 0; i0 < block.num_rows; i0 += kSide) {
    const int64_t i1 = std::min(block.num_rows, i0 + kSide);
    for (int64_t n0 = 0; n0 < shape.n; n0 += kSide) {
      const int64_t n1 = std::min(shape.n, n0 + kSide);
      for (int64_t i = i0; i < i1; ++i) {
        T line[kSide];
        std::memcpy(line,
                    from + (i * block.row_stride + n0) *
                               static_cast<int64_t>(sizeof(T)),
                    static_cast<size_t>(n1 - n0) * sizeof(T));
        for (int64_t n = n0; n < n1; ++n) {
          to[n * shape.k + first + i] = line[n - n0];
        }
      }
    }
  }
}

}  // namespace

absl::Status PackRows(const PackedMatrix& shape, const RowBlock& block,
                      int64_t first_column, void* memory) {
  if (block.num_rows < 0 || first_column < 0 ||
      first_column > shape.n - block.num_rows) {
    return absl::OutOfRangeError(
        absl::StrCat("pack: the block's rows become columns [", first_column,
                     ", ", first_column + block.num_rows,
                     ") of W, but W has columns [0, ", shape.n, ")"));
  }
  if (block.row_stride < shape.k) {
    return absl::OutOfRangeError(
        absl::StrCat("pack: row stride ", block.row_stride,
                     " is less than k, which is ", shape.k));
  }
  if (shape.layout == WeightLayout::kRows) {
    CopyRows(shape, block, first_column, static_cast<char*>(memory));
    return absl::OkStatus();
  }
  // Numbers are moved as integers of the same size, so nothing is converted.
  if (DTypeBytes(shape.dtype) == 2) {
    Pack(shape, block, first_column, static_cast<uint16_t*>(memory));
  } else {
    Pack(shape, block, first_column, static_cast<uint32_t*>(memory));
  }
  return absl::OkStatus();
}

absl::Status PackAsTheyLie(const PackedMatrix& shape, const RowBlock& block,
                           int64_t first_row, void* memory) {
  if (block.num_rows < 0 || first_row < 0 ||
      first_row > shape.k - block.num_rows) {
    return absl::OutOfRangeError(
        absl::StrCat("pack: the block's rows become rows [", first_row, ", ",
                     first_row + block.num_rows, ") of W, but W has rows [0, ",
                     shape.k, ")"));
  }
  if (block.row_stride < shape.n) {
    return absl::OutOfRangeError(
        absl::StrCat("pack: row stride ", block.row_stride,
                     " is less than n, which is ", shape.n));
  }
  const int64_t width = DTypeBytes(shape.dtype);
  if (shape.layout == WeightLayout::kRows) {
    if (width == 2) {
      TransposeRows(shape, block, first_row, static_cast<uint16_t*>(memory));
    } else {
      TransposeRows(shape, block, first_row, static_cast<uint32_t*>(memory));
    }
    return absl::OkStatus();
  }
  for (int64_t i = 0; i < block.num_rows; ++i) {
    const char* const row =
        static_cast<const char*>(block.data) + i * block.row_stride * width;
    for (int64_t n = 0; n < shape.n; n += kPanelColumns) {
      const int64_t count = std::min(kPanelColumns, shape.n - n);
      std::memcpy(static_cast<char*>(memory) +
                      (n * shape.k + (first_row + i) * kPanelColumns) * width,
                  row + n * width, static_cast<size_t>(count * width));
    }
  }
  return absl::OkStatus();
}

void ZeroPadding(const PackedMatrix& shape, void* memory) {
  const int64_t used = shape.n % kPanelColumns;
  if (shape.layout == WeightLayout::kRows || used == 0) return;
  const int64_t width = DTypeBytes(shape.dtype);
  char* panel = static_cast<char*>(memory) +
                (shape.num_panels() - 1) * shape.k * kPanelColumns * width;
  for (int64_t k = 0; k < shape.k; ++k) {
    std::memset(panel + (k * kPanelColumns + used) * width, 0,
                static_cast<size_t>((kPanelColumns - used) * width));
  }
}

int64_t FirstNotFinite(const void* data, DType dtype, int64_t count) {
  const auto* const numbers = static_cast<const char*>(data);
  const int64_t width = DTypeBytes(dtype);
  const uint32_t bits = ExponentBits(dtype);
  for (int64_t begin = 0; begin < count; begin += kFiniteBlock) {
    const int64_t end = std::min(count, begin + kFiniteBlock);
    if (end - begin == kFiniteBlock) {
      const char* const block = numbers + begin * width;
      if (!(width == 2
                ? HWY_DYNAMIC_DISPATCH(AnyHas16)(block, kFiniteBlock, bits)
                : HWY_DYNAMIC_DISPATCH(AnyHas32)(block, kFiniteBlock, bits))) {
        continue;
      }
    }
    for (int64_t i = begin; i < end; ++i) {
      uint32_t number = 0;
      std::memcpy(&number, numbers + i * width, static_cast<size_t>(width));
      if ((number & bits) == bits) return i;
    }
  }
  return -1;
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
