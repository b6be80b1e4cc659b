// Adds a key bias (latents/key_bias.h) to scores. For inclusion by *_cpu.cc.
#if defined(KVASIR_KERNELS_KEY_BIAS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef KVASIR_KERNELS_KEY_BIAS_INL_H_
#undef KVASIR_KERNELS_KEY_BIAS_INL_H_
#else
#define KVASIR_KERNELS_KEY_BIAS_INL_H_
#endif

#include <algorithm>

#include "hwy/highway.h"
#include "kernels/attention/cpu/rebuild-inl.h"
#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/grid/attention_rows.h"
#include "kernels/linear/tile-inl.h"
#include "kernels/simd/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace kvasir::kernels {
namespace HWY_NAMESPACE {

// Slots [begin, end) of a block, counted from its start, whose positions are in
// the same tile of kKeyBiasTile positions.
struct TileRun {
  int64_t begin;
  int64_t end;
  int64_t tile;  // position / kKeyBiasTile
};

// Adds the key bias to the scores of a panel's rows.
// Threads: each object is used by one thread only.
class KeyBiasScores {
 public:
  // `numbers` is the panel's PanelState::key_bias.
  KeyBiasScores(const AttentionGrid& grid, const UnitRows& unit, float* numbers)
      : params_(grid.params()),
        grid_(grid),
        unit_(unit),
        numbers_(numbers),
        columns_(grid.key_bias_columns()) {}

  bool any() const { return params_.key_bias != nullptr; }

  // Copies each row's numbers for the key bias from q to the panel's state, and
  // multiplies them by AttentionKeyBias::unit. Call it before the first block.
  void LoadQueries() const {
    for (int64_t r = 0; any() && r < unit_.count(); ++r) {
      const float* const from = params_.q +
                                unit_.TokenRow(r) * params_.q_row_stride +
                                params_.key_bias->query_column[unit_.HeadOf(r)];
      for (int64_t i = 0; i < columns_; ++i) {
        numbers_[r * columns_ + i] = params_.key_bias->unit * from[i];
      }
    }
  }

  // Adds the key bias to the scores [rows, 64] of the block that begins at slot
  // `block`. Only the scores of `slots` are used later.
  void Add(int64_t block, VisibleRange slots, float* scores) {
    if (!any()) return;
    const AttentionKeyBias& bias = *params_.key_bias;
    const AttentionGrid::Spans spans = unit_.KeySpans(0);
    for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
      const RowRange rows = unit_.RowsOf(*span);
      FindRuns(span->kv_head, block, slots);
      for (int64_t i = 0; i < num_runs_; ++i) {
        AddTile(span->kv_head, runs_[i], rows, scores);
      }
      if (bias.exact_pairs == 0) continue;
      TileArgs args = {};
      args.a = numbers_ + rows.begin * columns_ +
               KeyBiasTileColumns(bias.tile_pairs);
      args.a_stride = columns_;
      args.b = turns_;
      args.b_stride = kBlock;
      args.c = scores + rows.begin * kBlock;
      args.c_stride = kBlock;
      args.depth = 2 * bias.exact_pairs;
      args.accumulate = true;
      Multiply<float>(args, rows.size(), kBlock);
    }
  }

 private:
  static_assert(kKeyBiasTile == kAttentionBlockSlots);
  // The places of tile pairs and then of exact pairs, each padded to whole
  // vectors.
  static constexpr int64_t kMostPlaces =
      kAttentionMaxHeadDim / 2 + kMostExactPairs + 2 * kLanes;

  // Finds the runs of `slots` (TileRun). If each slot's position is its slot
  // number, the block is one tile and therefore one run. Otherwise also
  // fills in_tile_.
  void FindRuns(int64_t kv_head, int64_t block, VisibleRange slots) {
    in_order_ = !params_.mass.stored_positions && !unit_.sequence().positions;
    if (in_order_) {
      runs_[0] = {0, kBlock, block / kKeyBiasTile};
      num_runs_ = 1;
      return;
    }
    std::fill_n(turns_, 2 * params_.key_bias->exact_pairs * kBlock, 0.0f);
    num_runs_ = 0;
    for (int64_t s = slots.begin; s < slots.end; ++s) {
      const int64_t position = PositionOf(kv_head, s);
      const int64_t tile = position / kKeyBiasTile;
      in_tile_[s - block] = static_cast<int32_t>(position % kKeyBiasTile);
      if (num_runs_ > 0 && runs_[num_runs_ - 1].tile == tile) {
        runs_[num_runs_ - 1].end = s - block + 1;
      } else {
        runs_[num_runs_++] = {s - block, s - block + 1, tile};
      }
    }
  }
  int64_t PositionOf(int64_t kv_head, int64_t slot) const {
    const AttentionSequence& sequence = unit_.sequence();
    if (!params_.mass.stored_positions) {
      return sequence.positions.device_address()[slot];
    }
    const int64_t page =
        sequence.block_table.device_address()[slot / params_.page_tokens];
    return PositionsOf(
        params_.metadata, page,
        params_.unit_of_head[kv_head])[slot % params_.page_tokens];
  }

  // Adds the contribution of the tile pairs to the scores of a run. Sets the
  // run's part of `turns_` to the cosines and sines of the exact pairs.
  void AddTile(int64_t kv_head, const TileRun& run, RowRange rows,
               float* scores) {
    const AttentionKeyBias& bias = *params_.key_bias;
    SplitSteps(kv_head);
    FindAngles(run.tile);
    const float* const in_tile = grid_.key_bias_turns(kv_head);
    const int64_t first_exact = PadPairs(bias.tile_pairs);
    for (int64_t e = 0; e < bias.exact_pairs; ++e) {
      Turn(run, {cosines_[first_exact + e], sines_[first_exact + e]},
           in_tile + e * 2 * kKeyBiasTile, turns_ + e * 2 * kBlock);
    }
    if (bias.tile_pairs == 0) return;
    // The cosines and then the sines by which the query's numbers for the tile
    // pairs are multiplied, and then zeros. Each copy may write up to a vector
    // too much, which the next one overwrites.
    HWY_ALIGN float factors[kAttentionMaxHeadDim + 2 * kLanes];
    const int64_t columns = KeyBiasTileColumns(bias.tile_pairs);
    for (int64_t p = 0; p < bias.tile_pairs; p += kVecLanes) {
      hn::StoreU(LoadFloats(cosines_ + p), kFloats, factors + p);
    }
    for (int64_t p = 0; p < bias.tile_pairs; p += kVecLanes) {
      hn::StoreU(LoadFloats(sines_ + p), kFloats,
                 factors + bias.tile_pairs + p);
    }
    for (int64_t i = 2 * bias.tile_pairs; i < columns; i += kVecLanes) {
      hn::StoreU(hn::Zero(kFloats), kFloats, factors + i);
    }
    int64_t r = rows.begin;
    for (; r + 4 <= rows.end; r += 4) {
      AddToRows<4>(factors, columns, run, r, scores);
    }
    for (; r < rows.end; ++r) {
      AddToRows<1>(factors, columns, run, r, scores);
    }
  }

  // Returns the number of places of `pairs` pairs in whole vectors.
  static constexpr int64_t PadPairs(int64_t pairs) {
    return (pairs + kVecLanes - 1) / kVecLanes * kVecLanes;
  }

  // Splits the steps of a head's pairs into halves, as TurnsAt needs them.
  void SplitSteps(int64_t kv_head) {
    if (split_head_ == kv_head) return;
    split_head_ = kv_head;
    const AttentionKeyBias& bias = *params_.key_bias;
    const int64_t pairs = bias.tile_pairs + bias.exact_pairs;
    const uint64_t* const steps = bias.steps + kv_head * pairs;
    std::fill_n(steps_low_, kMostPlaces, 0u);
    std::fill_n(steps_high_, kMostPlaces, 0u);
    for (int64_t p = 0; p < pairs; ++p) {
      const int64_t place =
          p < bias.tile_pairs ? p
                              : PadPairs(bias.tile_pairs) + p - bias.tile_pairs;
      steps_low_[place] = static_cast<uint32_t>(steps[p]);
      steps_high_[place] = static_cast<uint32_t>(steps[p] >> 32);
    }
  }

  // Computes the cosine and sine of each pair's angle: at the tile's centre for
  // tile pairs, at the tile's first position for exact pairs.
  void FindAngles(int64_t tile) {
    const int64_t first_exact = PadPairs(params_.key_bias->tile_pairs);
    const int64_t end = first_exact + params_.key_bias->exact_pairs;
    const auto first = static_cast<uint64_t>(tile * kKeyBiasTile);
    const auto centre =
        static_cast<uint64_t>(KeyBiasCentre(tile * kKeyBiasTile));
    for (int64_t p = 0; p < end; p += kVecLanes) {
      const WordHalves turns = TurnsAt(p < first_exact ? centre : first,
                                       {hn::Load(kWords, steps_low_ + p),
                                        hn::Load(kWords, steps_high_ + p)});
      const ReducedAngles angles = ReduceTurnsVec(turns);
      CosSinVec(angles.remainder, angles.quarter, 1.0f, cosines_ + p,
                sines_ + p);
    }
  }

  // Computes the cosines [64] and sines [64] of a pair at the slots of a run.
  // `first` has those at the start of the tile. `in_tile` [2, 64] has those of
  // the angles from there to each position of the tile.
  void Turn(const TileRun& run, const UnitVector& first, const float* in_tile,
            float* to) const {
    if (!in_order_) {
      for (int64_t s = run.begin; s < run.end; ++s) {
        const float c = in_tile[in_tile_[s]];
        const float sine = in_tile[kKeyBiasTile + in_tile_[s]];
        to[s] = std::fma(first.cosine, c, -(first.sine * sine));
        to[kBlock + s] = std::fma(first.sine, c, first.cosine * sine);
      }
      return;
    }
    const Vec cosine = Broadcast(first.cosine);
    const Vec sine = Broadcast(first.sine);
    for (int64_t s = 0; s < kBlock; s += kVecLanes) {
      const Vec c = LoadFloats(in_tile + s);
      const Vec turn = LoadFloats(in_tile + kKeyBiasTile + s);
      hn::StoreU(Fma(cosine, c, hn::Neg(hn::Mul(sine, turn))), kFloats, to + s);
      hn::StoreU(Fma(sine, c, hn::Mul(cosine, turn)), kFloats, to + kBlock + s);
    }
  }

  template <int kRows>
  void AddToRows(const float* factors, int64_t columns, const TileRun& run,
                 int64_t first, float* scores) const {
    Wide lanes[kRows];
    for (int r = 0; r < kRows; ++r) {
      const float* const numbers = numbers_ + (first + r) * columns_;
      lanes[r] = MakeWide([](int) { return hn::Zero(kFloats); });
      for (int64_t i = 0; i < columns; i += kLanes) {
        for (int v = 0; v < kVecsPerWide; ++v) {
          const int64_t at = i + v * kVecLanes;
          lanes[r].part[v] = Fma(LoadFloats(numbers + at),
                                 LoadFloats(factors + at), lanes[r].part[v]);
        }
      }
    }
    float sums[kRows];
    ReduceWides(lanes, AddStep(), sums);
    for (int r = 0; r < kRows; ++r) {
      float* const row = scores + (first + r) * kBlock;
      if (run.end - run.begin == kBlock) {
        AddToRow(sums[r], row);
        continue;
      }
      for (int64_t s = run.begin; s < run.end; ++s) row[s] = row[s] + sums[r];
    }
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const UnitRows& unit_;
  float* const numbers_;
  const int64_t columns_;
  bool in_order_ = true;
  int64_t num_runs_ = 0;
  TileRun runs_[kAttentionBlockSlots];
  int32_t in_tile_[kAttentionBlockSlots];  // position in the tile, by slot
  int64_t split_head_ = -1;  // the KV head whose steps are in steps_*_
  HWY_ALIGN uint32_t steps_low_[kMostPlaces];
  HWY_ALIGN uint32_t steps_high_[kMostPlaces];
  HWY_ALIGN float cosines_[kMostPlaces];
  HWY_ALIGN float sines_[kMostPlaces];
  // [exact pairs][2, 64]: the cosines and sines at the block's slots
  HWY_ALIGN float turns_[2 * kMostExactPairs * kAttentionBlockSlots];
};

}  // namespace HWY_NAMESPACE
}  // namespace kvasir::kernels
HWY_AFTER_NAMESPACE();

#endif  // KVASIR_KERNELS_KEY_BIAS_INL_H_
