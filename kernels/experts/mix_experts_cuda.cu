// mix_experts on a GPU. Each thread computes packs of the output: 16 bytes or
// one number (simt::LaunchOnRows).
//
// The activations y and out have the type args.dtype, although their
// pointers are to float. Products and sums are float32; the sum is rounded
// once to args.dtype.
//
// Layout: rows of N neighbouring numbers. They are read 16 bytes at a time if N
// and the pointers allow it, otherwise one number at a time.
//
// Bytes for each token, with B bytes per number: K N B are read and N B
// are written. Operations: K multiplications and K additions for each of
// the N numbers. The lower bound of the time is the bytes divided by the
// memory bandwidth.
#include "kernels/experts/mix_experts.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

template <typename T, int n>
KVASIR_KERNEL(simt::kRowThreads)
MixExpertsKernel(simt::OnRows<MixExpertsArgs> on) {
  using Pack = simt::Pack<T, n>;
  const MixExpertsArgs& args = on.args;
  const auto* const y = reinterpret_cast<const T*>(args.y);
  simt::ForPacksOfRows<n>(
      on, args.num_tokens, args.columns, [&](int64_t token, int64_t column) {
        float sum[n];
        KVASIR_UNROLL
        // Sums start from -0, because 0 + -0 would be 0 instead of -0.
        for (int k = 0; k < n; ++k) sum[k] = -0.0f;
        KVASIR_NO_UNROLL
        for (int64_t j = 0; j < args.top_k; ++j) {
          const int64_t at = token * args.top_k + j;
          const float weight = simt::LoadGlobal(args.weights + at);
          const int64_t row = simt::LoadGlobal(args.places + at);
          const auto pack = simt::LoadOnce(
              reinterpret_cast<const Pack*>(y + row * args.columns + column));
          KVASIR_UNROLL
          for (int k = 0; k < n; ++k) {
            sum[k] += weight * simt::ToFloat(pack.number[k]);
          }
        }
        Pack rounded;
        KVASIR_UNROLL
        for (int k = 0; k < n; ++k) {
          rounded.number[k] = simt::FromFloat<T>(sum[k]);
        }
        simt::StoreGlobal(
            reinterpret_cast<Pack*>(reinterpret_cast<T*>(args.out) +
                                    token * args.columns + column),
            rounded);
      });
}

}  // namespace

void MixExpertsCuda(const MixExpertsArgs& args, Launcher& launcher) {
  VisitDType(args.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int n = simt::kWidePack<T>;
    if (simt::WideRows<T>(args.columns, args.y, args.out)) {
      simt::LaunchOnRows(launcher, "mix_experts", args.num_tokens,
                         args.columns / n, MixExpertsKernel<T, n>, args);
    } else {
      simt::LaunchOnRows(launcher, "mix_experts", args.num_tokens, args.columns,
                         MixExpertsKernel<T, 1>, args);
    }
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
