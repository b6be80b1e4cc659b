// hadamard on a GPU. A warp transforms one latent of one row, or a whole CTA
// does if the model has a block wider than kWarpFloats. Each block is in shared
// memory while it is transformed.
//
// x and y have the type args.dtype, whatever the type of their pointers. The
// order of operations is that of hadamard.h, so float32 activations give the
// same bits as on a CPU. A multiply-add with an entry of K (+1 or -1) rounds
// like an addition or subtraction.
//
// Layout: rows of latents, row strides apart. Neighbouring threads access
// neighbouring numbers.
//
// Each number is read once and written once. A block of order k m takes k m
// log2(m) additions, and k^2 m more if k > 1. Lower bound of the time: the
// bytes divided by the bandwidth of the memory.
#include <cmath>

#include "kernels/latents/hadamard.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;
// The largest order of a block that a single warp transforms: 16 floats per
// lane.
constexpr int64_t kWarpFloats = 512;

struct HadamardLaunch {
  HadamardArgs args;
  // floats of shared memory for each team (a warp or a whole CTA)
  int64_t block_floats = 0;
};

// A barrier for a team. A team is a warp or a whole CTA that transforms a block
// together.
template <uint32_t team>
KVASIR_DEVICE void SyncTeam(simt::Site site = simt::Site::Here()) {
  if constexpr (team == simt::kWarp) {
    simt::SyncWarp(simt::kWholeWarp, site);
  } else {
    simt::SyncCta(site);
  }
}

// The work of one thread of a team that transforms a block. `z` is shared
// memory of the team.
template <typename T, uint32_t team>
KVASIR_DEVICE void TransformBlock(const HadamardBlock& block, bool transposed,
                                  const T* x, float* z, T* y) {
  const auto member = static_cast<int32_t>(simt::Thread() % team);
  // int32_t suffices, because a block fits in shared memory.
  const auto order = static_cast<int32_t>(block.order);
  const auto k = static_cast<int32_t>(block.kernel_order);
  const int32_t m = order / k;
  for (int32_t i = member; i < order; i += int32_t{team}) {
    simt::StoreShared(z + i, simt::ToFloat(simt::LoadGlobal(x + i)));
  }
  SyncTeam<team>();
  for (int32_t s = m / 2; s > 0; s /= 2) {
    for (int32_t j = member; j < order / 2; j += int32_t{team}) {
      // Among the indices in which the bit with value s is 0, i is number j,
      // counted from 0.
      const int32_t i = 2 * j - (j & (s - 1));
      const float first = simt::LoadShared(z + i);
      const float second = simt::LoadShared(z + i + s);
      simt::StoreShared(z + i, first + second);
      simt::StoreShared(z + i + s, first - second);
    }
    SyncTeam<team>();
  }
  const float* const signs = transposed ? block.rows : block.columns;
  const auto scale =
      static_cast<float>(1.0 / std::sqrt(static_cast<double>(block.order)));
  for (int32_t i = member; i < order; i += int32_t{team}) {
    float acc = 0.0f;
    if (k == 1) {
      acc = simt::LoadShared(z + i);
    } else {
      const int32_t a = i / m;
      const int32_t p = i - a * m;
      for (int32_t b = 0; b < k; ++b) {
        acc = simt::Fma(simt::LoadGlobal(signs + b * block.stride + a),
                        simt::LoadShared(z + b * m + p), acc);
      }
    }
    simt::StoreGlobal(y + i, simt::FromFloat<T>(acc * scale));
  }
}

template <typename T, uint32_t team>
KVASIR_KERNEL(kThreads)
HadamardKernel(HadamardLaunch launch) {
  const HadamardArgs& args = launch.args;
  const uint32_t in_cta = simt::Thread() / team;
  const int64_t row = int64_t{simt::CtaX()} * (kThreads / team) + in_cta;
  if (row >= args.num_rows) return;  // all threads of a team return together
  float* const z =
      reinterpret_cast<float*>(simt::Shared()) + in_cta * launch.block_floats;
  const HadamardLatent latent = args.latents[simt::CtaY()];
  const T* x = reinterpret_cast<const T*>(args.x) + row * args.x_row_stride +
               latent.column;
  T* y = reinterpret_cast<T*>(args.y) + row * args.y_row_stride + latent.column;
  for (int64_t b = 0; b < latent.num_blocks; ++b) {
    const HadamardBlock block = latent.blocks[b];
    TransformBlock<T, team>(block, args.transposed, x, z, y);
    x += block.order;
    y += block.order;
    // waits until all threads of the team have read z
    if (b + 1 < latent.num_blocks) SyncTeam<team>();
  }
}

template <typename T, uint32_t team>
void LaunchHadamard(const HadamardLaunch& args, Launcher& launcher) {
  constexpr int64_t kTeams = kThreads / team;
  KernelLaunch launch;
  launch.name = "hadamard";
  launch.grid_x = simt::Ctas(args.args.num_rows, kTeams);
  launch.grid_y = simt::Ctas(args.args.num_latents, 1, simt::kMostCtasY);
  launch.threads = kThreads;
  launch.shared_bytes = static_cast<uint32_t>(kTeams * args.block_floats *
                                              int64_t{sizeof(float)});
  simt::Launch(launcher, launch, HadamardKernel<T, team>, args);
}

}  // namespace

void HadamardCuda(const HadamardArgs& args, float*, Launcher& launcher) {
  // scratch_floats is twice the order of the widest block.
  const HadamardLaunch launch = {args, args.scratch_floats / 2};
  VisitDType(args.dtype, [&](auto type) {
    using T = decltype(type);
    if (launch.block_floats <= kWarpFloats) {
      LaunchHadamard<T, simt::kWarp>(launch, launcher);
    } else {
      LaunchHadamard<T, kThreads>(launch, launcher);
    }
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
