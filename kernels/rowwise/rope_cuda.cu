// rope on a GPU: one CTA to a token, which makes the token's cosines and sines
// once, in shared memory, for all heads of both tensors; then a warp to a head.
//
// q and k are of args.dtype whatever their pointers say; angles, products and
// sums are those of rope.h, in float32, rounded once as they are stored.
// Layout: rows of heads, row_stride apart; a warp's lanes take neighbouring
// pairs, so that of kHalfSplit each access is a run of 32 numbers.
// Bytes of a token: its rotated numbers, read and written. Operations: 6 to a
// pair and head, about 40 to an angle. Floor: bytes over the memory's
// bandwidth, while there are a few heads to an angle.
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/op_table.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;

template <typename T>
KVASIR_DEVICE void RotateHead(RopePairing pairing, const RopeHead& head,
                              const float* cosines, const float* sines,
                              T* numbers) {
  // Of one head: far below 2^31.
  const auto pairs = static_cast<int32_t>(head.num_pairs);
  const bool half_split = pairing == RopePairing::kHalfSplit;
  const int32_t step = half_split ? 1 : 2;
  const int32_t apart = half_split ? pairs : 1;
  for (auto i = static_cast<int32_t>(simt::Lane()); i < pairs;
       i += int32_t{simt::kWarp}) {
    const int32_t angle =
        head.pairs != nullptr ? simt::LoadGlobal(head.pairs + i) : i;
    T* const first = numbers + i * step;
    T* const second = first + apart;
    const float a = simt::ToFloat(simt::LoadGlobal(first));
    const float b = simt::ToFloat(simt::LoadGlobal(second));
    const float c = simt::LoadShared(cosines + angle);
    const float s = simt::LoadShared(sines + angle);
    simt::StoreGlobal(first, simt::FromFloat<T>(simt::Fma(a, c, -(b * s))));
    simt::StoreGlobal(second, simt::FromFloat<T>(simt::Fma(b, c, a * s)));
  }
}

template <typename T>
KVASIR_DEVICE void RotateHeads(const RopeTensorArgs& tensor,
                               const RopeArgs& args, const float* cosines,
                               const float* sines) {
  if (tensor.data == nullptr) return;
  T* const row = reinterpret_cast<T*>(tensor.data) +
                 int64_t{simt::CtaX()} * tensor.row_stride;
  for (int64_t h = simt::Warp(); h < tensor.num_heads;
       h += kThreads / simt::kWarp) {
    RopeHead head = {h * tensor.head_dim, args.rotary_dim / 2, nullptr};
    if (tensor.heads != nullptr) {
      const RopeHead& listed = tensor.heads[h];
      head = {simt::LoadGlobal(&listed.begin),
              simt::LoadGlobal(&listed.num_pairs),
              simt::LoadGlobal(&listed.pairs)};
    }
    RotateHead(args.pairing, head, cosines, sines, row + head.begin);
  }
}

template <typename T>
KVASIR_KERNEL(kThreads)
RopeKernel(RopeArgs args) {
  const int64_t angles = args.rotary_dim / 2;
  auto* const cosines = reinterpret_cast<float*>(simt::Shared());
  float* const sines = cosines + angles;
  const auto position =
      static_cast<uint64_t>(simt::LoadGlobal(args.positions + simt::CtaX()));
  for (int64_t f = simt::Thread(); f < angles; f += kThreads) {
    const ReducedAngle angle =
        ReduceTurns(simt::LoadGlobal(args.steps + f) * position);
    float sine, cosine;
    SinCosReduced(angle.remainder, &sine, &cosine);
    RotateByQuarter(angle.quarter, sine, cosine, &sine, &cosine);
    simt::StoreShared(cosines + f, cosine * args.attention_factor);
    simt::StoreShared(sines + f, sine * args.attention_factor);
  }
  simt::SyncCta();
  RotateHeads<T>(args.q, args, cosines, sines);
  RotateHeads<T>(args.k, args, cosines, sines);
}

}  // namespace

void RopeCuda(const RopeArgs& args, float*, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "rope";
  launch.grid_x = simt::Ctas(args.num_tokens);
  launch.threads = kThreads;
  launch.shared_bytes =
      static_cast<uint32_t>(args.rotary_dim) * uint32_t{sizeof(float)};
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, RopeKernel<decltype(type)>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
