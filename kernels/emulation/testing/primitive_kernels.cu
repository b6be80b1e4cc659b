#include "kernels/emulation/testing/primitive_kernels.h"
#include "kernels/simt/copy.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/mma.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/rows.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kTileBytes = 1024;
constexpr uint32_t kTileWords = kTileBytes / 4;
constexpr uint32_t kStages = 2;

KernelLaunch Shape(const char* name, uint32_t ctas, uint32_t threads,
                   uint32_t shared_bytes) {
  KernelLaunch launch;
  launch.name = name;
  launch.grid_x = ctas;
  launch.threads = threads;
  launch.shared_bytes = shared_bytes;
  return launch;
}

KVASIR_KERNEL(1024) IndicesKernel(PrimitiveArgs args) {
  const uint32_t cta = simt::CtaY() * simt::CtasX() + simt::CtaX();
  args.out[cta * simt::Threads() + simt::Thread()] =
      simt::Thread() | simt::CtaX() << 10 | simt::CtaY() << 20 |
      simt::CtasX() << 26;
}

KVASIR_KERNEL(32) WarpKernel(PrimitiveArgs args) {
  const uint32_t lane = simt::Lane();
  const uint32_t value = args.in[lane];
  const float number = simt::BitsAs<float>(value);
  uint32_t* const out = args.out + 16 * lane;
  out[0] = simt::ShuffleXor(value, 5);
  out[1] = simt::ShuffleFrom(value, 7);
  out[2] = simt::ShuffleUp(value, 3);
  out[3] = simt::ShuffleDown(value, 4);
  const uint32_t half = lane < 16 ? 0x0000ffffu : 0xffff0000u;
  if (lane < 16) {
    out[4] = simt::ShuffleXor(value, 1, half);
  } else {
    out[4] = simt::ShuffleXor(value, 1, half);
  }
  out[5] = simt::Ballot(value % 2 == 1);
  out[6] = simt::Any(value % 2 == 1) ? 1u : 0u;
  out[7] = simt::All(value % 2 == 1) ? 1u : 0u;
  out[8] = simt::BitsAs<uint32_t>(simt::WarpSum(number));
  out[9] = simt::BitsAs<uint32_t>(simt::WarpMax(number));
}

KVASIR_KERNEL(32) MaximaKernel(PrimitiveArgs args) {
  const uint32_t lane = simt::Lane();
  const float number = simt::BitsAs<float>(args.in[lane]);
  const float other = simt::BitsAs<float>(args.in[lane ^ 1]);
  args.out[2 * lane] = simt::BitsAs<uint32_t>(simt::Max(number, other));
  args.out[2 * lane + 1] = simt::BitsAs<uint32_t>(simt::WarpMax(number));
}

KVASIR_KERNEL(64) BarriersKernel(PrimitiveArgs args) {
  auto* const words = reinterpret_cast<uint32_t*>(simt::Shared());
  const uint32_t lane = simt::Lane();
  // Warp 0 writes, and warp 1 reads. Then they exchange these roles.
  if (simt::Warp() == 0) {
    simt::StoreShared(words + lane, args.in[lane]);
    simt::ArriveBarrier(1, 64);
    simt::SyncBarrier(2, 64);
    args.out[lane] = simt::LoadShared(words + 32 + lane);
  } else {
    simt::SyncBarrier(1, 64);
    args.out[32 + lane] = simt::LoadShared(words + lane);
    simt::StoreShared(words + 32 + lane, args.in[32 + lane]);
    simt::ArriveBarrier(2, 64);
  }
}

KVASIR_KERNEL(32) CopiesKernel(PrimitiveArgs args) {
  char* const shared = simt::Shared();
  const auto* const in = reinterpret_cast<const char*>(args.in);
  const uint32_t lane = simt::Lane();
  // Copies one part of the data with each width that is supported.
  simt::CopyAsync<16>(shared + 16 * lane, in + 16 * lane);
  simt::CommitCopies();
  simt::CopyAsync<8>(shared + 512 + 8 * lane, in + 512 + 8 * lane);
  simt::CommitCopies();
  simt::CopyAsync<4>(shared + 768 + 4 * lane, in + 768 + 4 * lane);
  simt::CommitCopies();
  simt::WaitCopies<2>();
  // No barrier is needed, because each thread reads only what it has copied
  // itself.
  const auto first =
      simt::LoadShared(reinterpret_cast<const simt::Vec16*>(shared) + lane);
  simt::StoreGlobal(reinterpret_cast<simt::Vec16*>(args.out) + lane, first);
  simt::WaitCopies<0>();
  simt::SyncCta();
  const auto* const words = reinterpret_cast<const uint32_t*>(shared + 512);
  for (uint32_t i = lane; i < 96; i += 32) {
    args.out[128 + i] = simt::LoadShared(words + i);
  }
}

KVASIR_KERNEL(64) BulkCopiesKernel(PrimitiveArgs args) {
  char* const shared = simt::Shared();
  auto* const full =
      reinterpret_cast<simt::CopyBarrier*>(shared + kStages * kTileBytes);
  const uint32_t thread = simt::Thread();
  const auto* const in = reinterpret_cast<const char*>(args.in);
  const auto copy = [&](uint32_t tile) {
    const uint32_t stage = tile % kStages;
    simt::ArriveExpecting(full + stage, kTileBytes);
    simt::CopyBulk(shared + stage * kTileBytes, in + tile * kTileBytes,
                   kTileBytes, full + stage);
  };
  if (thread == 0) {
    for (uint32_t s = 0; s < kStages; ++s) simt::InitCopyBarrier(full + s, 1);
    for (uint32_t s = 0; s < kStages && s < args.count; ++s) copy(s);
  }
  simt::SyncCta();
  for (uint32_t tile = 0; tile < args.count; ++tile) {
    simt::WaitPhase(full + tile % kStages, tile / kStages);
    const auto* const words =
        reinterpret_cast<const uint32_t*>(shared + tile % kStages * kTileBytes);
    for (uint32_t i = thread; i < kTileWords; i += 64) {
      args.out[tile * kTileWords + i] = simt::LoadShared(words + i);
    }
    simt::SyncCta();
    if (thread == 0 && tile + kStages < args.count) copy(tile + kStages);
  }
}

// d += A B, with A and B at `in`.
template <bool bf16>
KVASIR_DEVICE void AddProduct(const uint32_t* in, float (&d)[4]) {
  const uint32_t g = simt::Lane() / 4;
  const uint32_t c = simt::Lane() % 4;
  const uint32_t* const rows = in;           // [16][8] words
  const uint32_t* const columns = in + 128;  // [8][8] words
  const uint32_t a[4] = {rows[g * 8 + c], rows[(g + 8) * 8 + c],
                         rows[g * 8 + c + 4], rows[(g + 8) * 8 + c + 4]};
  const uint32_t b[2] = {columns[g * 8 + c], columns[g * 8 + c + 4]};
  if constexpr (bf16) {
    simt::MmaBf16(d, a, b);
  } else {
    simt::MmaF16(d, a, b);
  }
}
KVASIR_DEVICE void OutProduct(const float (&d)[4], uint32_t* out) {
  const uint32_t g = simt::Lane() / 4;
  const uint32_t c = simt::Lane() % 4;
  for (uint32_t i = 0; i < 4; ++i) {
    out[(g + 8 * (i / 2)) * 8 + 2 * c + i % 2] = simt::BitsAs<uint32_t>(d[i]);
  }
}

template <bool bf16>
KVASIR_KERNEL(32)
MmaKernel(PrimitiveArgs args) {
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  AddProduct<bf16>(args.in, d);
  OutProduct(d, args.out);
}

template <bool signed_a>
KVASIR_KERNEL(32)
MmaBytesKernel(PrimitiveArgs args) {
  const uint32_t g = simt::Lane() / 4;
  const uint32_t c = simt::Lane() % 4;
  const uint32_t* const rows = args.in;           // [16][8] words
  const uint32_t* const columns = args.in + 128;  // [8][8] words
  const uint32_t a[4] = {rows[g * 8 + c], rows[(g + 8) * 8 + c],
                         rows[g * 8 + c + 4], rows[(g + 8) * 8 + c + 4]};
  const uint32_t b[2] = {columns[g * 8 + c], columns[g * 8 + c + 4]};
  int32_t d[4] = {1, 2, 3, 4};
  if constexpr (signed_a) {
    simt::MmaS8(d, a, b);
  } else {
    simt::MmaU8(d, a, b);
  }
  for (uint32_t i = 0; i < 4; ++i) {
    args.out[(g + 8 * (i / 2)) * 8 + 2 * c + i % 2] =
        static_cast<uint32_t>(d[i]);
  }
}

template <bool bf16>
KVASIR_KERNEL(32)
MmaChainKernel(PrimitiveArgs args) {
  float d[4] = {};
  for (uint32_t i = 0; i < args.count; ++i) {
    AddProduct<bf16>(args.in + 192 * i, d);
  }
  OutProduct(d, args.out);
}

template <int count, bool transposed>
KVASIR_DEVICE uint32_t* OutMatrices(const char* row, uint32_t* out) {
  uint32_t words[count];
  simt::LoadMatrices<count, transposed>(words, row);
  for (int i = 0; i < count; ++i) {
    out[simt::Lane() * count + static_cast<uint32_t>(i)] = words[i];
  }
  return out + 32 * count;
}

KVASIR_KERNEL(32) MatricesKernel(PrimitiveArgs args) {
  auto* const words = reinterpret_cast<uint32_t*>(simt::Shared());
  const uint32_t lane = simt::Lane();
  for (uint32_t i = lane; i < 128; i += 32) {
    simt::StoreShared(words + i, args.in[i]);
  }
  simt::SyncWarp();
  const char* const row = simt::Shared() + 16 * lane;
  uint32_t* out = args.out;
  out = OutMatrices<1, false>(row, out);
  out = OutMatrices<2, false>(row, out);
  out = OutMatrices<4, false>(row, out);
  out = OutMatrices<1, true>(row, out);
  out = OutMatrices<2, true>(row, out);
  OutMatrices<4, true>(row, out);
}

KVASIR_KERNEL(64) AtomicsKernel(PrimitiveArgs args) {
  auto* const threads = reinterpret_cast<uint32_t*>(simt::Shared());
  if (simt::Thread() == 0) simt::StoreAtomic(threads, 0u);
  simt::SyncCta();
  simt::AtomicAdd<simt::Scope::kCta>(threads, 1u);
  simt::AtomicAdd(args.out, 1u);
  simt::AtomicAdd(reinterpret_cast<float*>(args.out + 1), 0.5f);
  simt::AtomicAdd(reinterpret_cast<uint64_t*>(args.out + 4),
                  uint64_t{0x80000001});
  simt::AtomicMax(
      reinterpret_cast<int32_t*>(args.out + 2),
      static_cast<int32_t>(simt::CtaX() * simt::Threads() + simt::Thread()));
  uint32_t seen = 0, before = 1;
  while (seen != before) {
    before = seen;
    seen = simt::AtomicCas(args.out + 3, before, before + 1);
  }
  simt::SyncCta();
  if (simt::Thread() == 0) args.more[simt::CtaX()] = simt::LoadAtomic(threads);
}

KVASIR_KERNEL(64) HandOverKernel(PrimitiveArgs args) {
  uint32_t* const flag = args.more;
  uint32_t* const words = args.more + 16;
  const uint32_t thread = simt::Thread();
  if (simt::CtaX() == 0) {
    words[thread] = args.in[thread];
    simt::SyncCta();
    if (thread == 0) simt::StoreAtomic<simt::Order::kRelease>(flag, 1u);
  } else {
    if (thread == 0) {
      while (simt::LoadAtomic<simt::Order::kAcquire>(flag) == 0) {
      }
    }
    simt::SyncCta();
    args.out[thread] = words[thread];
  }
}

template <typename T>
KVASIR_DEVICE void OutPairs(uint32_t a, uint32_t b, uint32_t c, uint32_t* out) {
  out[0] = simt::FmaPair(T{}, a, b, c);
  out[1] = simt::AddPair<T>(a, b);
  out[2] = simt::SubPair<T>(a, b);
  out[3] = simt::MulPair<T>(a, b);
}

KVASIR_KERNEL(128) NumbersKernel(PrimitiveArgs args) {
  const uint32_t i = simt::CtaX() * simt::Threads() + simt::Thread();
  if (i >= args.count) return;
  const uint32_t a = args.in[3 * i], b = args.in[3 * i + 1];
  const uint32_t c = args.in[3 * i + 2];
  const float x = simt::BitsAs<float>(a);
  uint32_t* const out = args.out + kNumberWords * i;
  OutPairs<Bf16>(a, b, c, out);
  OutPairs<F16>(a, b, c, out + 4);
  out[8] = simt::PickBytes(a, b, c);
  out[9] = simt::BitsAs<uint32_t>(simt::ToFloat(simt::FromFloat<Bf16>(x)));
  out[10] = simt::BitsAs<uint32_t>(simt::ToFloat(simt::FromFloat<F16>(x)));
  out[11] = simt::BitsAs<uint32_t>(simt::Exp2(x));
  out[12] = simt::BitsAs<uint32_t>(simt::Sqrt(x));
  out[13] = simt::BitsAs<uint32_t>(
      simt::Fma(x, simt::BitsAs<float>(b), simt::BitsAs<float>(c)));
  out[14] = simt::MinPair(a, b);
}

KVASIR_KERNEL(64) GridSumKernel(PrimitiveArgs args) {
  constexpr uint32_t kTile = 64;  // one number per thread
  auto* const tiles = reinterpret_cast<float*>(simt::Shared());
  float* const partial = tiles + kStages * kTile;
  const uint32_t thread = simt::Thread();
  const uint32_t num_tiles = args.count / kTile;
  const uint32_t* const in = args.in + uint64_t{simt::CtaX()} * args.count;
  const auto copy = [&](uint32_t tile) {
    if (tile < num_tiles) {
      simt::CopyAsync<4>(tiles + tile % kStages * kTile + thread,
                         in + tile * kTile + thread);
    }
    simt::CommitCopies();
  };
  copy(0);
  float sum = 0.0f;
  for (uint32_t tile = 0; tile < num_tiles; ++tile) {
    copy(tile + 1);
    simt::WaitCopies<1>();
    simt::SyncCta();
    // Reads the number that another thread has copied.
    sum += simt::LoadShared(tiles + tile % kStages * kTile + (thread ^ 33));
    // The tile's buffer may be overwritten only after all threads have read it.
    simt::SyncCta();
  }
  sum = simt::CtaSum(sum, partial);
  bool* const last = reinterpret_cast<bool*>(partial + 2);
  auto* const sums = reinterpret_cast<float*>(args.more + 1);
  if (thread == 0) {
    sums[simt::CtaX()] = sum;
    simt::Fence<simt::Scope::kGpu>();
    const uint32_t before = simt::AtomicAdd(args.more, 1u);
    simt::Fence<simt::Scope::kGpu>();
    *last = before + 1 == simt::CtasX();
  }
  simt::SyncCta();
  if (!*last) return;
  float all = 0.0f;
  for (uint32_t i = thread; i < simt::CtasX(); i += 64) all += sums[i];
  all = simt::CtaSum(all, partial + 4);
  if (thread == 0) args.out[0] = simt::BitsAs<uint32_t>(all);
}

}  // namespace

void LaunchIndices(const PrimitiveArgs& args, uint32_t ctas_x, uint32_t ctas_y,
                   uint32_t threads, Launcher& launcher) {
  KernelLaunch launch = Shape("indices", ctas_x, threads, 0);
  launch.grid_y = ctas_y;
  simt::Launch(launcher, launch, IndicesKernel, args);
}
void LaunchWarp(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher, Shape("warp", 1, 32, 0), WarpKernel, args);
}
void LaunchMaxima(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher, Shape("maxima", 1, 32, 0), MaximaKernel, args);
}
void LaunchBarriers(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher, Shape("barriers", 1, 64, 256), BarriersKernel, args);
}
void LaunchCopies(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher, Shape("copies", 1, 32, 896), CopiesKernel, args);
}
void LaunchBulkCopies(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher,
               Shape("bulk_copies", 1, 64, kStages * (kTileBytes + 8)),
               BulkCopiesKernel, args);
}
void LaunchMma(const PrimitiveArgs& args, bool bf16, Launcher& launcher) {
  simt::Launch(launcher, Shape("mma", 1, 32, 0),
               bf16 ? MmaKernel<true> : MmaKernel<false>, args);
}
void LaunchMmaBytes(const PrimitiveArgs& args, bool signed_a,
                    Launcher& launcher) {
  simt::Launch(launcher, Shape("mma_bytes", 1, 32, 0),
               signed_a ? MmaBytesKernel<true> : MmaBytesKernel<false>, args);
}
void LaunchMmaChain(const PrimitiveArgs& args, bool bf16, Launcher& launcher) {
  simt::Launch(launcher, Shape("mma_chain", 1, 32, 0),
               bf16 ? MmaChainKernel<true> : MmaChainKernel<false>, args);
}
void LaunchMatrices(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher, Shape("matrices", 1, 32, 512), MatricesKernel, args);
}
void LaunchAtomics(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher) {
  simt::Launch(launcher, Shape("atomics", ctas, 64, 4), AtomicsKernel, args);
}
void LaunchHandOver(const PrimitiveArgs& args, Launcher& launcher) {
  KernelLaunch launch = Shape("hand_over", 2, 64, 0);
  launch.ctas_together = true;
  simt::Launch(launcher, launch, HandOverKernel, args);
}
void LaunchNumbers(const PrimitiveArgs& args, Launcher& launcher) {
  simt::Launch(launcher, Shape("numbers", (args.count + 127) / 128, 128, 0),
               NumbersKernel, args);
}
void LaunchGridSum(const PrimitiveArgs& args, uint32_t ctas,
                   Launcher& launcher) {
  simt::Launch(launcher, Shape("grid_sum", ctas, 64, kStages * 256 + 32),
               GridSumKernel, args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
