// norm on a GPU: one CTA to a row.
//
// Activations (x, residual, out) are of args.dtype whatever their pointers say;
// weight and bias are float32. Sums are float32.
// Layout: rows of M numbers without gaps; 16 bytes at a time where that divides
// a row (all pointers are aligned then), one number elsewhere.
// Order of sums (norm.h): a thread's packs in order, then simt::CtaSum.
// Bytes of a row, B to a number: x is read (M B), with residual it is read too
// and x written (2 M B), out is written (M B); weight and bias stay in the
// caches (of 16-bit rows a thread takes 8 of them by two accesses, so that each
// sector is asked for twice). The passes after the first find the row there
// too. Operations: 2 M fused ones of kRms and 4 M of kLayer, besides
// conversions: a row is bound by its bytes. Floor: bytes over the memory's
// bandwidth.
#include "kernels/simt/launch.h"
#include "kernels/simt/op_table.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
// Of shared memory: each warp's part of two sums.
constexpr uint32_t kPartials = kThreads / simt::kWarp;

// Calls visit(first column, pack of x) for the packs that are the thread's.
template <typename T, int n, typename Visit>
KVASIR_DEVICE void ForPacks(const T* x, int64_t columns, const Visit& visit) {
  using Pack = simt::Pack<T, n>;
  KVASIR_NO_UNROLL
  for (int64_t i = int64_t{n} * simt::Thread(); i < columns;
       i += int64_t{n} * kThreads) {
    visit(i, simt::LoadGlobal(reinterpret_cast<const Pack*>(x + i)));
  }
}

template <typename T, int n>
KVASIR_KERNEL(kThreads)
NormKernel(NormArgs args) {
  using Pack = simt::Pack<T, n>;
  const int64_t columns = args.columns;
  const int64_t row = int64_t{simt::CtaX()} * columns;
  T* const x = reinterpret_cast<T*>(args.x) + row;
  if (args.residual != nullptr) {
    const T* const residual = reinterpret_cast<const T*>(args.residual) + row;
    ForPacks<T, n>(x, columns, [&](int64_t i, Pack pack) {
      const Pack more =
          simt::LoadGlobal(reinterpret_cast<const Pack*>(residual + i));
      KVASIR_UNROLL
      for (int k = 0; k < n; ++k) {
        pack.number[k] = simt::FromFloat<T>(simt::ToFloat(pack.number[k]) +
                                            simt::ToFloat(more.number[k]));
      }
      simt::StoreGlobal(reinterpret_cast<Pack*>(x + i), pack);
    });
  }
  if (args.out == nullptr) return;

  // From here on a thread reads what it wrote itself.
  auto* const partial = reinterpret_cast<float*>(simt::Shared());
  const float count = static_cast<float>(columns);
  float mean = 0.0f;
  if (args.kind == NormKind::kLayer) {
    float sum = 0.0f;
    ForPacks<T, n>(x, columns, [&](int64_t, const Pack& pack) {
      KVASIR_UNROLL
      for (int k = 0; k < n; ++k) sum += simt::ToFloat(pack.number[k]);
    });
    mean = simt::CtaSum(sum, partial) / count;
  }
  float squares = 0.0f;
  ForPacks<T, n>(x, columns, [&](int64_t, const Pack& pack) {
    KVASIR_UNROLL
    for (int k = 0; k < n; ++k) {
      const float d = simt::ToFloat(pack.number[k]) - mean;
      squares = simt::Fma(d, d, squares);
    }
  });
  const float variance = simt::CtaSum(squares, partial + kPartials) / count;
  const float inverse = 1.0f / simt::Sqrt(variance + args.eps);

  T* const out = reinterpret_cast<T*>(args.out) + row;
  const bool layer = args.kind == NormKind::kLayer;
  ForPacks<T, n>(x, columns, [&](int64_t i, const Pack& pack) {
    float weight[n];
    float bias[n] = {};
    simt::LoadFloats(args.weight + i, weight);
    if (layer) simt::LoadFloats(args.bias + i, bias);
    Pack scaled;
    KVASIR_UNROLL
    for (int k = 0; k < n; ++k) {
      const float d = (simt::ToFloat(pack.number[k]) - mean) * inverse;
      scaled.number[k] = simt::FromFloat<T>(
          layer ? simt::Fma(d, weight[k], bias[k]) : d * weight[k]);
    }
    simt::StoreGlobal(reinterpret_cast<Pack*>(out + i), scaled);
  });
}

template <typename T>
void LaunchNorm(const NormArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "norm";
  launch.grid_x = simt::Ctas(args.num_rows);
  launch.threads = kThreads;
  launch.shared_bytes = 2 * kPartials * sizeof(float);
  // By the columns alone, as sums depend on it.
  simt::Launch(launcher, launch,
               simt::WideRows<T>(args.columns)
                   ? NormKernel<T, simt::kWidePack<T>>
                   : NormKernel<T, 1>,
               args);
}

}  // namespace

void NormCuda(const NormArgs& args, Launcher& launcher) {
  VisitDType(args.dtype,
             [&](auto type) { LaunchNorm<decltype(type)>(args, launcher); });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
