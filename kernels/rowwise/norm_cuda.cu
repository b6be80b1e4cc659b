// norm on a GPU: one CTA per row.
//
// Activations (x, residual, out) have the type args.dtype, whatever their
// pointers' type; weight and bias are float32. Sums are float32.
//
// Layout: rows of M numbers. They are read in packs of 16 bytes if the size of
// a row and args.stride are multiples of 16 bytes (all pointers are then
// aligned), otherwise one number at a time. Order of sums (norm.h): a thread's
// packs in order, then simt::CtaSum.
//
// Bytes of a row with B bytes per number: x is read and out is written (2 M B).
// With a residual, the residual is read and x is written (2 M B more). Weight
// and bias stay in the caches.
//
// The threads hold the first 16 KiB of a row in registers, so a shorter row is
// read from memory once. Later passes over a longer row find the rest in the
// caches.
//
// Operations: 2 M fused multiply-adds for kRms, 4 M for kLayer. Shortest
// possible time: the bytes divided by the memory's bandwidth.
#include "kernels/rowwise/norm.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
// How many floats of shared memory each of the two sums needs: one partial sum
// per warp.
constexpr uint32_t kPartials = kThreads / simt::kWarp;

// The packs of a row that this thread processes. The first few are kept in
// registers, so they are read from memory only once.
template <typename T, int n>
class ThreadsPacks {
 public:
  using Pack = simt::Pack<T, n>;

  KVASIR_DEVICE ThreadsPacks(const T* x, int64_t columns)
      : x_(x), columns_(columns) {
    Load(x, held_);
  }

  // Calls visit(first column, pack) for each pack of the thread.
  template <typename Visit>
  KVASIR_DEVICE void ForEach(const Visit& visit) const {
    KVASIR_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (Column(i) < columns_) visit(Column(i), held_[i]);
    }
    KVASIR_NO_UNROLL
    for (int64_t at = Column(kHeld); at < columns_;
         at += Column(1) - Column(0)) {
      visit(at, At(x_, at));
    }
  }

  // Adds the packs of another row and stores the sums in this one.
  KVASIR_DEVICE void Add(const T* other, T* x) {
    Pack more[kHeld] = {};
    Load(other, more);
    KVASIR_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (Column(i) < columns_) AddPack(more[i], x + Column(i), &held_[i]);
    }
    KVASIR_NO_UNROLL
    for (int64_t at = Column(kHeld); at < columns_;
         at += Column(1) - Column(0)) {
      Pack pack = At(x_, at);
      AddPack(At(other, at), x + at, &pack);
    }
  }

 private:
  static constexpr int kHeld = 4;

  static KVASIR_DEVICE int64_t Column(int i) {
    return n * (int64_t{simt::Thread()} + int64_t{kThreads} * i);
  }
  static KVASIR_DEVICE Pack At(const T* row, int64_t column,
                               simt::Site site = simt::Site::Here()) {
    return simt::LoadGlobal(reinterpret_cast<const Pack*>(row + column), site);
  }
  KVASIR_DEVICE void Load(const T* row, Pack (&packs)[kHeld],
                          simt::Site site = simt::Site::Here()) const {
    KVASIR_UNROLL
    for (int i = 0; i < kHeld; ++i) {
      if (Column(i) < columns_) packs[i] = At(row, Column(i), site);
    }
  }
  static KVASIR_DEVICE void AddPack(const Pack& more, T* to, Pack* pack) {
    KVASIR_UNROLL
    for (int k = 0; k < n; ++k) {
      pack->number[k] = simt::FromFloat<T>(simt::ToFloat(pack->number[k]) +
                                           simt::ToFloat(more.number[k]));
    }
    simt::StoreGlobal(reinterpret_cast<Pack*>(to), *pack);
  }

  const T* x_;
  int64_t columns_;
  Pack held_[kHeld] = {};
};

template <typename T, int n>
KVASIR_KERNEL(kThreads)
NormKernel(NormArgs args) {
  using Pack = simt::Pack<T, n>;
  const int64_t columns = args.columns;
  const int64_t row = args.Begin(int64_t{simt::CtaX()});
  T* const x = reinterpret_cast<T*>(args.x) + row;
  ThreadsPacks<T, n> packs(x, columns);
  if (args.residual != nullptr) {
    packs.Add(reinterpret_cast<const T*>(args.residual) + row, x);
  }
  if (args.out == nullptr) return;

  // The next passes over x need no barrier, because each thread reads only
  // numbers that it has written itself.
  auto* const partial = reinterpret_cast<float*>(simt::Shared());
  const float count = static_cast<float>(columns);
  float mean = 0.0f;
  if (args.kind == NormKind::kLayer) {
    float sum = 0.0f;
    packs.ForEach([&](int64_t, const Pack& pack) {
      KVASIR_UNROLL
      for (int k = 0; k < n; ++k) sum += simt::ToFloat(pack.number[k]);
    });
    mean = simt::CtaSum(sum, partial) / count;
  }
  float squares = 0.0f;
  packs.ForEach([&](int64_t, const Pack& pack) {
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
  packs.ForEach([&](int64_t i, const Pack& pack) {
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
  // The kernel is chosen only by sizes that are fixed at load, because the
  // choice changes the order of sums.
  simt::Launch(launcher, launch,
               simt::WideRows<T>(args.columns) && simt::WideRows<T>(args.stride)
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
