// rope on a GPU. A CTA first computes the cosines and sines of a token, in
// shared memory. Then its eight warps rotate one head of q or k at a time. If
// there are many tokens, a CTA has all heads of a token. If there are few,
// several CTAs share a token, down to eight heads per CTA.
//
// q and k have the type args.dtype, whatever their pointers' type. Angles,
// products and sums are those of rope.h, in float32, rounded once when stored.
//
// Layout: rows of heads, row_stride apart. The lanes of a warp take
// neighbouring pairs, so with kHalfSplit each access covers 32
// neighbouring numbers.
//
// The rotated numbers of a token are read and written once. Operations: 6 per
// pair of each head, and about 40 per angle. If several heads share an angle,
// the shortest possible time is the bytes divided by the memory's bandwidth.
#include <algorithm>

#include "kernels/rowwise/rope.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWarps = kThreads / simt::kWarp;

template <typename T>
KVASIR_DEVICE void RotateHead(RopePairing pairing, const RopeHead& head,
                              const float* cosines, const float* sines,
                              T* numbers) {
  // int32_t suffices, because a head has far fewer than 2^31 pairs.
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

// Rotates the heads `first`, `first` + `step`, ... of one tensor.
template <typename T>
KVASIR_DEVICE void RotateHeads(const RopeTensorArgs& tensor,
                               const RopeArgs& args, const float* cosines,
                               const float* sines, uint32_t first,
                               uint32_t step) {
  if (tensor.data == nullptr) return;
  T* const row = reinterpret_cast<T*>(tensor.data) +
                 int64_t{simt::CtaX()} * tensor.row_stride;
  for (int64_t h = first; h < tensor.num_heads; h += step) {
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

int64_t HeadsOf(const RopeTensorArgs& tensor) {
  return tensor.data != nullptr ? tensor.num_heads : 0;
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
  // Warps take the heads of k in reverse order, so that warps with fewer heads
  // of q get more heads of k.
  const uint32_t warps = kWarps * simt::CtasY();
  const uint32_t warp = kWarps * simt::CtaY() + simt::Warp();
  RotateHeads<T>(args.q, args, cosines, sines, warp, warps);
  RotateHeads<T>(args.k, args, cosines, sines, warps - 1 - warp, warps);
}

}  // namespace

void RopeCuda(const RopeArgs& args, float*, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "rope";
  launch.grid_x = simt::Ctas(args.num_tokens);
  // The number of CTAs that the GPU can run at the same time.
  const int64_t resident =
      launcher.multiprocessors() * int64_t{2048 / kThreads};
  launch.grid_y = std::min(
      {simt::Ctas(HeadsOf(args.q) + HeadsOf(args.k), kWarps), simt::kMostCtasY,
       static_cast<uint32_t>(std::max<int64_t>(
           resident / std::max<int64_t>(args.num_tokens, 1), 1))});
  launch.threads = kThreads;
  launch.shared_bytes =
      static_cast<uint32_t>(args.rotary_dim) * uint32_t{sizeof(float)};
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, RopeKernel<decltype(type)>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
