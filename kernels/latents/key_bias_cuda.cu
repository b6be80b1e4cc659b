// key_bias on a GPU. A warp computes one query head of a token, or the key of
// one KV head. Its lanes divide the pairs of the head.
//
// Rows have the type args.dtype, whatever the pointer's type. Angles, products
// and sums are those of key_bias.h, in float32, rounded once when stored.
//
// Each number of a query's pairs is read once, and two numbers per pair are
// written. A key's tile pairs are read and written once. An angle is about 40
// operations; only keys need angles.
#include <algorithm>

#include "kernels/latents/key_bias.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 128;
constexpr uint32_t kWarps = kThreads / simt::kWarp;

KVASIR_DEVICE KeyBiasPair PairAt(const KeyBiasPair* pair) {
  KeyBiasPair loaded;
  loaded.first = simt::LoadGlobal(&pair->first);
  loaded.second = simt::LoadGlobal(&pair->second);
  loaded.bias_first = simt::LoadGlobal(&pair->bias_first);
  loaded.bias_second = simt::LoadGlobal(&pair->bias_second);
  loaded.step = simt::LoadGlobal(&pair->step);
  return loaded;
}

template <typename T>
KVASIR_DEVICE void Store(T* to, float number) {
  simt::StoreGlobal(to, simt::FromFloat<T>(number));
}

template <typename T>
KVASIR_DEVICE void MakeNumbers(const KeyBiasArgs& args,
                               const KeyBiasPair* pairs, const T* q, T* out) {
  const auto tile = static_cast<int32_t>(args.tile_pairs);
  const int32_t all = tile + static_cast<int32_t>(args.exact_pairs);
  const auto columns = static_cast<int32_t>(KeyBiasTileColumns(tile));
  const auto lane = static_cast<int32_t>(simt::Lane());
  for (int32_t i = lane; i < all; i += int32_t{simt::kWarp}) {
    const KeyBiasPair pair = PairAt(pairs + i);
    const float q0 = simt::ToFloat(simt::LoadGlobal(q + pair.first));
    const float q1 = simt::ToFloat(simt::LoadGlobal(q + pair.second));
    T* const to = i < tile ? out + i : out + columns + 2 * (i - tile);
    Store(to, simt::Fma(q0, pair.bias_first, q1 * pair.bias_second));
    Store(to + (i < tile ? tile : 1),
          simt::Fma(q1, pair.bias_first, -(q0 * pair.bias_second)));
  }
  for (int32_t i = 2 * tile + lane; i < columns; i += int32_t{simt::kWarp}) {
    Store(out + i, 0.0f);
  }
}

template <typename T>
KVASIR_DEVICE void AddToKey(const KeyBiasArgs& args, const KeyBiasPair* pairs,
                            int64_t position, T* key) {
  const auto here = static_cast<uint64_t>(position);
  const auto centre = static_cast<uint64_t>(KeyBiasCentre(position));
  const auto tile = static_cast<int32_t>(args.tile_pairs);
  for (auto i = static_cast<int32_t>(simt::Lane()); i < tile;
       i += int32_t{simt::kWarp}) {
    const KeyBiasPair pair = PairAt(pairs + i);
    const UnitVector at = UnitVectorAt(pair.step * here);
    const UnitVector of_tile = UnitVectorAt(pair.step * centre);
    const float c = at.cosine - of_tile.cosine;
    const float s = at.sine - of_tile.sine;
    const float k0 = simt::ToFloat(simt::LoadGlobal(key + pair.first));
    const float k1 = simt::ToFloat(simt::LoadGlobal(key + pair.second));
    Store(
        key + pair.first,
        simt::Fma(args.unit,
                  simt::Fma(pair.bias_first, c, -(pair.bias_second * s)), k0));
    Store(key + pair.second,
          simt::Fma(args.unit,
                    simt::Fma(pair.bias_second, c, pair.bias_first * s), k1));
  }
}

template <typename T>
KVASIR_KERNEL(kThreads)
KeyBiasKernel(KeyBiasArgs args) {
  const auto token = int64_t{simt::CtaX()};
  T* const row = reinterpret_cast<T*>(args.rows) + token * args.row_stride;
  const int64_t pairs = args.tile_pairs + args.exact_pairs;
  const int64_t heads_per_kv = args.num_heads / args.num_kv_heads;
  const int64_t step = int64_t{kWarps} * simt::CtasY();
  for (int64_t h = int64_t{kWarps} * simt::CtaY() + simt::Warp();
       h < args.num_heads + args.num_kv_heads; h += step) {
    const int64_t j =
        h < args.num_heads ? h / heads_per_kv : h - args.num_heads;
    const KeyBiasPair* const of_head = args.pairs + j * pairs;
    if (h < args.num_heads) {
      MakeNumbers<T>(args, of_head,
                     row + simt::LoadGlobal(args.query_column + h),
                     row + simt::LoadGlobal(args.out_column + h));
    } else {
      AddToKey<T>(args, of_head, simt::LoadGlobal(args.positions + token),
                  row + simt::LoadGlobal(args.key_column + j));
    }
  }
}

}  // namespace

void KeyBiasCuda(const KeyBiasArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "key_bias";
  launch.grid_x = simt::Ctas(args.num_tokens);
  launch.grid_y = std::min(
      simt::Ctas(args.num_heads + args.num_kv_heads, kWarps), simt::kMostCtasY);
  launch.threads = kThreads;
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, KeyBiasKernel<decltype(type)>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
