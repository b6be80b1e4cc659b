// Adds what a key bias contributes to scores (AttentionKeyBias) on a GPU.
// C++17, device code.
//
// The positions of a split's slots fill eight tiles of 64 positions in order.
// All threads first compute the cosines and sines of these tiles' angles for
// the item's KV head. Then a warp adds the key bias to the scores of one row:
// for each tile, one number for all slots, and two multiply-adds per slot for
// each exact pair. For an exact pair, the query's numbers u and v
// (paged_attention.h) are rotated to the tile's first position once per row and
// tile. A CPU rotates the pair's cosine and sine instead, so the bits differ.
//
// Cost: with S tile pairs and E exact pairs, a warp takes about S / 4 + 25 +
// 14 E instructions for a row and a tile. With S = 18 and E = 4, this is 1.3
// instructions per slot.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr int32_t kTilesOfSplit =
    static_cast<int32_t>(kAttentionSplitSlots / kKeyBiasTile);

// Returns the KV head of an item. If there is a key bias, all query heads of an
// item belong to one KV head.
KVASIR_DEVICE int64_t KvHeadOf(const AttentionDevice& device,
                               const Item& item) {
  return Quotient(device.heads[item.unit.first_head],
                  Quotient(device.num_heads, device.num_kv_heads));
}

// Adds the key bias of a layer to the scores of an item's rows over a split.
// Does nothing if the layer has no key bias, or if `may_have` is false.
template <typename T, bool may_have = true>
class SplitKeyBias {
 public:
  // `angles` points to shared memory of DeviceKeyBias::shared_bytes() bytes.
  KVASIR_DEVICE SplitKeyBias(const AttentionKernelArgs& args, float* angles)
      : args_(args), bias_(args.device.key_bias), angles_(angles) {}

  // Computes the angles of the split's tiles, [kTilesOfSplit][pairs][2]: the
  // cosines and sines of each tile's centre (tile pairs) or first position
  // (exact pairs). All `threads` threads of the CTA must call it, and a barrier
  // must follow.
  KVASIR_DEVICE void Fill(const Item& item, int64_t split,
                          int32_t threads) const {
    if (!may_have || bias_.steps == nullptr) return;
    const int32_t pairs = bias_.tile_pairs + bias_.exact_pairs;
    const uint64_t* const steps =
        bias_.steps + KvHeadOf(args_.device, item) * pairs;
    for (auto i = static_cast<int32_t>(simt::Thread());
         i < kTilesOfSplit * pairs; i += threads) {
      const int32_t pair = i % pairs;
      int64_t position = split + i / pairs * kKeyBiasTile;
      if (pair < bias_.tile_pairs) position = KeyBiasCentre(position);
      const UnitVector at = UnitVectorAt(simt::LoadGlobal(steps + pair) *
                                         static_cast<uint64_t>(position));
      simt::StoreShared(angles_ + 2 * i, at.cosine);
      simt::StoreShared(angles_ + 2 * i + 1, at.sine);
    }
  }

  // Adds the key bias to scores of one row, which are already multiplied by
  // log2(e). scores[k] is the score of slot slot(k) of the split, and slot(k)
  // must ascend with k. Each tile of kKeyBiasTile slots must belong to a group
  // of `group` neighbouring lanes. All lanes of a warp must call it.
  template <int32_t group = static_cast<int32_t>(simt::kWarp), int32_t count,
            typename Slot>
  KVASIR_DEVICE void AddTo(const Item& item, int32_t row, const Slot& slot,
                           float (&scores)[count]) const {
    if (!may_have || bias_.steps == nullptr || row >= item.rows()) return;
    const int32_t tile_pairs = bias_.tile_pairs;
    const int32_t pairs = tile_pairs + bias_.exact_pairs;
    const float factor = args_.device.scale * simt::kLog2E;
    const float* const all_turns = bias_.turns + KvHeadOf(args_.device, item) *
                                                     bias_.exact_pairs * 2 *
                                                     kKeyBiasTile;
    const T* const q =
        static_cast<const T*>(args_.q) +
        RowStart(args_, item, row, bias_.column, args_.device.q_row_stride);
    const auto number = [q](int32_t column) {
      return simt::ToFloat(simt::LoadGlobal(q + column));
    };
    constexpr auto kEach = static_cast<int32_t>(kKeyBiasTile) / group;
    const auto lane = static_cast<int32_t>(simt::Lane());
    KVASIR_UNROLL
    for (int32_t first = 0; first < count; first += kEach) {
      const int32_t tile = slot(first) / int32_t{kKeyBiasTile};
      const float* const angles = angles_ + 2 * tile * pairs;
      float sum = 0.0f;
      KVASIR_NO_UNROLL
      for (int32_t p = lane % group; p < tile_pairs; p += group) {
        sum = simt::Fma(number(p), simt::LoadShared(angles + 2 * p), sum);
        sum = simt::Fma(number(tile_pairs + p),
                        simt::LoadShared(angles + 2 * p + 1), sum);
      }
      KVASIR_UNROLL
      for (uint32_t lanes = group / 2; lanes > 0; lanes /= 2) {
        sum += simt::ShuffleXor(sum, lanes);
      }
      float added[kEach];
      KVASIR_UNROLL
      for (int32_t k = 0; k < kEach; ++k) added[k] = sum;
      KVASIR_NO_UNROLL
      for (int32_t e = 0; e < bias_.exact_pairs; ++e) {
        const int32_t column = bias_.tile_columns + 2 * e;
        const float c = simt::LoadShared(angles + 2 * (tile_pairs + e));
        const float s = simt::LoadShared(angles + 2 * (tile_pairs + e) + 1);
        const float u = number(column);
        const float v = number(column + 1);
        const float turned_u = simt::Fma(u, c, v * s);
        const float turned_v = simt::Fma(v, c, -(u * s));
        const float* const turns = all_turns + e * 2 * kKeyBiasTile;
        KVASIR_UNROLL
        for (int32_t k = 0; k < kEach; ++k) {
          const int32_t i = slot(first + k) % int32_t{kKeyBiasTile};
          added[k] = simt::Fma(turned_u, simt::LoadGlobal(turns + i), added[k]);
          added[k] = simt::Fma(
              turned_v, simt::LoadGlobal(turns + kKeyBiasTile + i), added[k]);
        }
      }
      KVASIR_UNROLL
      for (int32_t k = 0; k < kEach; ++k) {
        float& score = scores[first + k];
        score = simt::Fma(added[k], factor * bias_.unit, score);
      }
    }
  }

 private:
  const AttentionKernelArgs& args_;
  const DeviceKeyBias& bias_;
  float* const angles_;
};

// Adds the key bias to a warp's scores of one tile, in the layout of products
// of tensor cores: score(r, n, j) is the lane's score of its r-th row and slot
// 8n + 2 (lane % 4) + j of the tile. numbers_of(r) points to that row's numbers
// for the key bias, or is null if the row does not exist. All lanes of a warp
// must call this.
//
// Each lane computes the angles of one pair and passes them to the other lanes
// by shuffles. With S tile pairs and E exact pairs, a lane takes per tile about
// 70 + 25 S / 4 instructions, and per score 2 E multiply-adds and E / 2 loads.
template <typename T, int32_t rows, typename NumbersOf, typename Score>
KVASIR_DEVICE void AddKeyBiasToTile(const DeviceKeyBias& bias, int64_t kv_head,
                                    int64_t position,
                                    const NumbersOf& numbers_of,
                                    const Score& score) {
  const int32_t pairs = bias.tile_pairs + bias.exact_pairs;
  const uint64_t* const steps = bias.steps + kv_head * pairs;
  const auto warp = static_cast<int32_t>(simt::kWarp);
  const auto lane = static_cast<int32_t>(simt::Lane());
  const auto at = [&](int32_t pair, int64_t where) {
    return pair < pairs ? UnitVectorAt(simt::LoadGlobal(steps + pair) *
                                       static_cast<uint64_t>(where))
                        : UnitVector{0.0f, 0.0f};
  };
  const auto from_lane = [](const UnitVector& vector, int32_t of) {
    return UnitVector{
        simt::ShuffleFrom(vector.cosine, static_cast<uint32_t>(of)),
        simt::ShuffleFrom(vector.sine, static_cast<uint32_t>(of))};
  };
  const T* numbers[rows];
  float sums[rows];
  KVASIR_UNROLL
  for (int32_t r = 0; r < rows; ++r) {
    numbers[r] = numbers_of(r);
    sums[r] = 0.0f;
  }
  const auto number = [&](int32_t r, int32_t column) {
    return numbers[r] == nullptr
               ? 0.0f
               : simt::ToFloat(simt::LoadGlobal(numbers[r] + column));
  };
  KVASIR_NO_UNROLL
  for (int32_t first = 0; first < bias.tile_pairs; first += warp) {
    const UnitVector own = at(first + lane, KeyBiasCentre(position));
    KVASIR_NO_UNROLL
    for (int32_t i = 0; i < warp && first + i < bias.tile_pairs; i += 4) {
      const UnitVector turn = from_lane(own, i + lane % 4);
      const int32_t p = first + i + lane % 4;
      if (p >= bias.tile_pairs) continue;
      KVASIR_UNROLL
      for (int32_t r = 0; r < rows; ++r) {
        sums[r] = simt::Fma(number(r, p), turn.cosine, sums[r]);
        sums[r] = simt::Fma(number(r, bias.tile_pairs + p), turn.sine, sums[r]);
      }
    }
  }
  KVASIR_UNROLL
  for (int32_t r = 0; r < rows; ++r) {
    sums[r] += simt::ShuffleXor(sums[r], 1);
    sums[r] += simt::ShuffleXor(sums[r], 2);
    sums[r] *= bias.unit;
    KVASIR_UNROLL
    for (int32_t n = 0; n < int32_t{kKeyBiasTile} / 8; ++n) {
      score(r, n, 0) += sums[r];
      score(r, n, 1) += sums[r];
    }
  }
  UnitVector own = at(bias.tile_pairs + lane, position);
  own.cosine *= bias.unit;
  own.sine *= bias.unit;
  KVASIR_NO_UNROLL
  for (int32_t e = 0; e < bias.exact_pairs; ++e) {
    const UnitVector first = from_lane(own, e);
    const int32_t column = bias.tile_columns + 2 * e;
    float u[rows];
    float v[rows];
    KVASIR_UNROLL
    for (int32_t r = 0; r < rows; ++r) {
      const float query_u = number(r, column);
      const float query_v = number(r, column + 1);
      u[r] = simt::Fma(query_u, first.cosine, query_v * first.sine);
      v[r] = simt::Fma(query_v, first.cosine, -(query_u * first.sine));
    }
    const float* const turns =
        bias.turns + (kv_head * bias.exact_pairs + e) * 2 * kKeyBiasTile +
        2 * (lane % 4);
    KVASIR_UNROLL
    for (int32_t n = 0; n < int32_t{kKeyBiasTile} / 8; ++n) {
      KVASIR_UNROLL
      for (int32_t j = 0; j < 2; ++j) {
        const float c = simt::LoadGlobal(turns + 8 * n + j);
        const float s = simt::LoadGlobal(turns + kKeyBiasTile + 8 * n + j);
        KVASIR_UNROLL
        for (int32_t r = 0; r < rows; ++r) {
          score(r, n, j) = simt::Fma(u[r], c, score(r, n, j));
          score(r, n, j) = simt::Fma(v[r], s, score(r, n, j));
        }
      }
    }
  }
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
