// Matrix products of a warp, and the loads of their operands. All 32 lanes take
// part. With g = lane / 4 and c = lane % 4, a lane holds
//   a[0..3]: A[g][2c,2c+1], A[g+8][2c,2c+1], A[g][2c+8,2c+9], A[g+8][2c+8,2c+9]
//   b[0..1]: B[2c,2c+1][g], B[2c+8,2c+9][g]
//   d[0..3]: D[g][2c], D[g][2c+1], D[g+8][2c], D[g+8][2c+1]
// of A [16, 16], B [16, 8] and D [16, 8]. In products of integers, A has 32
// columns and B 32 rows. A word then has four elements, from 4c in place of 2c
// on, and from 4c+16 in place of 2c+8 on. In a word, lower bits have the
// element with the lower index. C++17.
#pragma once

#include "kernels/device/dtype.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/target.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt {

// d += a b, added in float32. The emulator rounds each element of the result
// only once; a GPU adds the products in an order that is not documented.
KVASIR_DEVICE void MmaBf16(float (&d)[4], const uint32_t (&a)[4],
                           const uint32_t (&b)[2], Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulation::Mma(emulation::MmaKind::kBf16, d, a, b, site);
#endif
}
KVASIR_DEVICE void MmaF16(float (&d)[4], const uint32_t (&a)[4],
                          const uint32_t (&b)[2], Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulation::Mma(emulation::MmaKind::kF16, d, a, b, site);
#endif
}

// d += a b, exactly. B has signed bytes; A has unsigned bytes (MmaU8) or signed
// ones (MmaS8). The sum must fit into an int32_t.
KVASIR_DEVICE void MmaU8(int32_t (&d)[4], const uint32_t (&a)[4],
                         const uint32_t (&b)[2], Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulation::MmaBytes(/*signed_a=*/false, d, a, b, site);
#endif
}
KVASIR_DEVICE void MmaS8(int32_t (&d)[4], const uint32_t (&a)[4],
                         const uint32_t (&b)[2], Site site = Site::Here()) {
#ifdef __CUDACC__
  (void)site;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  emulation::MmaBytes(/*signed_a=*/true, d, a, b, site);
#endif
}

// Chooses MmaBf16 or MmaF16 by the type of A and B, which is the first
// argument.
KVASIR_DEVICE void Mma(Bf16, float (&d)[4], const uint32_t (&a)[4],
                       const uint32_t (&b)[2], Site site = Site::Here()) {
  MmaBf16(d, a, b, site);
}
KVASIR_DEVICE void Mma(F16, float (&d)[4], const uint32_t (&a)[4],
                       const uint32_t (&b)[2], Site site = Site::Here()) {
  MmaF16(d, a, b, site);
}

// Loads `count` (1, 2 or 4) matrices of 8 x 8 numbers of 2 bytes from shared
// memory. Lane 8m + r passes the address of row r of matrix m: 16 aligned
// bytes. Lanes from 8 * count on pass any address. For matrix m, a lane
// receives the word at [g][2c, 2c + 1], or if `transposed` at [2c, 2c + 1][g].
template <int count, bool transposed = false>
KVASIR_DEVICE void LoadMatrices(uint32_t (&words)[count], const void* row,
                                Site site = Site::Here()) {
  static_assert(count == 1 || count == 2 || count == 4,
                "count must be 1, 2 or 4");
#ifdef __CUDACC__
  (void)site;
  const uint32_t from = SharedAddress(row);
  if constexpr (count == 1 && !transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
                 : "=r"(words[0])
                 : "r"(from)
                 : "memory");
  } else if constexpr (count == 1) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(words[0])
                 : "r"(from)
                 : "memory");
  } else if constexpr (count == 2 && !transposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(words[0]), "=r"(words[1])
                 : "r"(from)
                 : "memory");
  } else if constexpr (count == 2) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
        : "=r"(words[0]), "=r"(words[1])
        : "r"(from)
        : "memory");
  } else if constexpr (!transposed) {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "r"(from)
        : "memory");
  } else {
    asm volatile(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, "
        "[%4];"
        : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
        : "r"(from)
        : "memory");
  }
#else
  emulation::LoadMatrices(words, count, transposed, row, site);
#endif
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET::simt
