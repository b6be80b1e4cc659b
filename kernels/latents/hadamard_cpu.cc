#include <cmath>
#include <cstring>

#include "kernels/device/parallel.h"
#include "kernels/device/stream.h"
#include "kernels/latents/hadamard.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/latents/hadamard_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {
namespace {

// Replaces the SIMD vectors u at `first` and v at `second` by u + v and u - v.
HWY_INLINE void Butterfly(float* first, float* second) {
  const Vec u = LoadFloats(first);
  const Vec v = LoadFloats(second);
  hn::StoreU(hn::Add(u, v), kFloats, first);
  hn::StoreU(hn::Sub(u, v), kFloats, second);
}

// Does the same for lanes i and i + s of one vector. Lane i receives the sum,
// and lane i + s the difference.
HWY_INLINE Vec ButterflyLanes(Vec z, int s) {
  const hn::RebindToSigned<Floats> d32;
  const auto lane = hn::Iota(d32, 0);
  const auto distance = hn::Set(d32, static_cast<int32_t>(s));
  const Vec other = hn::TableLookupLanes(
      z, hn::IndicesFromVec(kFloats, hn::Xor(lane, distance)));
  const auto is_second =
      hn::RebindMask(kFloats, hn::Eq(hn::And(lane, distance), distance));
  return hn::IfThenElse(is_second, hn::Sub(other, z), hn::Add(z, other));
}

// Multiplies z [n] by Sylvester's matrix of order n, in place.
void MultiplySylvester(int64_t n, float* z) {
  int64_t s = n / 2;
  for (; s >= kVecLanes; s /= 2) {
    for (int64_t begin = 0; begin < n; begin += 2 * s) {
      for (int64_t p = begin; p < begin + s; p += kVecLanes) {
        Butterfly(z + p, z + p + s);
      }
    }
  }
  if (n >= kVecLanes) {
    for (int64_t p = 0; p < n; p += kVecLanes) {
      Vec numbers = LoadFloats(z + p);
      for (int step = kVecLanes / 2; step > 0; step /= 2) {
        numbers = ButterflyLanes(numbers, step);
      }
      hn::StoreU(numbers, kFloats, z + p);
    }
    return;
  }
  for (; s > 0; s /= 2) {
    for (int64_t p = 0; p < n; ++p) {
      if ((p & s) != 0) continue;
      const float first = z[p];
      const float second = z[p + s];
      z[p] = first + second;
      z[p + s] = first - second;
    }
  }
}

void Scale(const float* from, int64_t count, float scale, float* to) {
  int64_t i = 0;
  for (; i + kVecLanes <= count; i += kVecLanes) {
    hn::StoreU(hn::Mul(LoadFloats(from + i), Broadcast(scale)), kFloats,
               to + i);
  }
  for (; i < count; ++i) to[i] = from[i] * scale;
}

// Multiplies kLines lines of z [m, stride] by the matrix K of the block
// (hadamard.h). Computes only kVecs SIMD vectors of each result, from
// element a on. If kLines * kVecs is 8, eight independent sums hide the
// latency of additions.
template <int kLines, int kVecs>
HWY_INLINE void MultiplyTile(const HadamardBlock& block, const float* signs,
                             const float* z, float scale, int64_t a,
                             float* out) {
  Vec acc[kLines][kVecs];
  for (int p = 0; p < kLines; ++p) {
    for (int v = 0; v < kVecs; ++v) acc[p][v] = hn::Zero(kFloats);
  }
  for (int64_t b = 0; b < block.kernel_order; ++b) {
    const float* line = signs + b * block.stride + a;
    for (int p = 0; p < kLines; ++p) {
      const Vec number = Broadcast(z[p * block.stride + b]);
      for (int v = 0; v < kVecs; ++v) {
        acc[p][v] = Fma(number, LoadFloats(line + v * kVecLanes), acc[p][v]);
      }
    }
  }
  for (int p = 0; p < kLines; ++p) {
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(hn::Mul(acc[p][v], Broadcast(scale)), kFloats,
                 out + p * block.stride + a + v * kVecLanes);
    }
  }
}

template <int kLines>
void MultiplyLines(const HadamardBlock& block, const float* signs,
                   const float* z, float scale, float* out) {
  constexpr int kVecs = 8 / kLines;
  int64_t a = 0;
  for (; a + kVecs * kVecLanes <= block.stride; a += kVecs * kVecLanes) {
    MultiplyTile<kLines, kVecs>(block, signs, z, scale, a, out);
  }
  for (; a < block.stride; a += kVecLanes) {
    MultiplyTile<kLines, 1>(block, signs, z, scale, a, out);
  }
}

// Multiplies x by a block whose kernel_order k is above 1. x [k, m] is
// transposed first, so that both factors of the block can be computed with
// whole SIMD vectors even if m is small.
void MultiplyKernel(const HadamardBlock& block, const float* signs,
                    const float* x, float scale, float* scratch, float* y) {
  const int64_t k = block.kernel_order;
  const int64_t m = block.order / k;
  const int64_t stride = block.stride;
  float* z = scratch;
  float* out = z + m * stride;
  for (int64_t p = 0; p < m; ++p) {
    for (int64_t b = 0; b < k; ++b) z[p * stride + b] = x[b * m + p];
    for (int64_t b = k; b < stride; ++b) z[p * stride + b] = 0.0f;
  }
  for (int64_t s = m / 2; s > 0; s /= 2) {
    for (int64_t p = 0; p < m; ++p) {
      if ((p & s) != 0) continue;
      for (int64_t b = 0; b < stride; b += kVecLanes) {
        Butterfly(z + p * stride + b, z + (p + s) * stride + b);
      }
    }
  }
  int64_t p = 0;
  for (; p + 8 <= m; p += 8) {
    MultiplyLines<8>(block, signs, z + p * stride, scale, out + p * stride);
  }
  for (; p + 2 <= m; p += 2) {
    MultiplyLines<2>(block, signs, z + p * stride, scale, out + p * stride);
  }
  if (p < m) {
    MultiplyLines<1>(block, signs, z + p * stride, scale, out + p * stride);
  }
  for (int64_t a = 0; a < k; ++a) {
    for (p = 0; p < m; ++p) y[a * m + p] = out[p * stride + a];
  }
}

void MultiplyBlock(const HadamardBlock& block, bool transposed, const float* x,
                   float* scratch, float* y) {
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(block.order)));
  if (block.kernel_order > 1) {
    const float* signs = transposed ? block.rows : block.columns;
    return MultiplyKernel(block, signs, x, scale, scratch, y);
  }
  std::memcpy(scratch, x, static_cast<size_t>(block.order) * sizeof(float));
  MultiplySylvester(block.order, scratch);
  Scale(scratch, block.order, scale, y);
}

void MultiplyRows(const HadamardArgs& params, int64_t begin, int64_t end,
                  float* scratch) {
  for (int64_t t = begin; t < end; ++t) {
    const float* x = params.x + t * params.x_row_stride;
    float* y = params.y + t * params.y_row_stride;
    for (int64_t l = 0; l < params.num_latents; ++l) {
      int64_t column = params.latents[l].column;
      for (int64_t b = 0; b < params.latents[l].num_blocks; ++b) {
        const HadamardBlock& block = params.latents[l].blocks[b];
        MultiplyBlock(block, params.transposed, x + column, scratch,
                      y + column);
        column += block.order;
      }
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvasir::kernels {
namespace {
HWY_EXPORT(MultiplyRows);
}  // namespace

void HadamardSimd(const HadamardArgs& params, float* scratch,
                  CpuStream& stream) {
  int64_t numbers = 0;
  for (int64_t l = 0; l < params.num_latents; ++l) {
    for (int64_t b = 0; b < params.latents[l].num_blocks; ++b) {
      numbers += params.latents[l].blocks[b].order;
    }
  }
  const int64_t per_thread = params.scratch_floats;
  ForRows(stream, params.num_rows, numbers,
          [&](int64_t begin, int64_t end, int thread) {
            HWY_DYNAMIC_DISPATCH(MultiplyRows)
            (params, begin, end, scratch + thread * per_thread);
          });
}

}  // namespace kvasir::kernels
#endif  // HWY_ONCE
