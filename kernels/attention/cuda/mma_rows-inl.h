// The rows of an item in shared memory, for mma_attention-inl.h: their staged
// queries, scores and weights. C++17, device code.
//
// Products have 8 columns. If they multiply numbers, each column belongs to one
// row. If they multiply codes, two neighbouring columns have the high and the
// low digits of one row (mma_digits.h), so a product has only 4 rows. In both
// cases, a lane with c = lane % 4 gets the sums of rows c and c + 4 of 8. So
// column n of 8 belongs to row n / 2 + n % 2 * 4. Scores and weights are stored
// in the order of columns.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/attention_key_bias.h"
#include "kernels/attention/cuda/mma_digits.h"
#include "kernels/attention/cuda/mma_exact-inl.h"
#include "kernels/attention/cuda/mma_ring-inl.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Base class of MmaAttention. Items have at most `tiles` tiles of 8 rows.
template <typename T, int32_t tiles, MmaKind kind, bool exact>
class MmaRows : protected MmaRing<tiles, kind, exact> {
  using Ring = MmaRing<tiles, kind, exact>;

 protected:
  using Ring::args_, Ring::chunks_, Ring::device_, Ring::item_, Ring::lane_,
      Ring::ring_, Ring::slots_, Ring::split_, Ring::params_, Ring::values_,
      Ring::warp_;
  using Ring::ChunkOf, Ring::ForRuns, Ring::HasNumbers, Ring::HasStaticRanges,
      Ring::KindOf, Ring::ValueParams, Ring::ReadAsCodes, Ring::ValueBlocks;
  using Ring::kBlock, Ring::kSplit, Ring::kStages, Ring::kWarps;
  using typename Ring::Place;

  static constexpr int32_t kRows = 8 * tiles;
  static constexpr int32_t kRowTiles = 2 * tiles;  // tiles of 4 rows
  static constexpr int32_t kWarpRows = kRows / kWarps;
  static constexpr int32_t kBlocks = kSplit / kBlock;
  static constexpr bool kHasCodes = kind != MmaKind::kNumbers;
  static constexpr bool kHasNumbers =
      kind == MmaKind::kNumbers || kind == MmaKind::kAny || exact;
  // True if the factors of staged digits include the scale of scores and
  // log2(e), because scores have no other summands.
  static constexpr bool kScaledDigits =
      kind != MmaKind::kNumbers && kind != MmaKind::kAny;
  // A row of scores has the scores of a split, and later the weights that
  // replace them: the high digits for the first run of values, from byte
  // kLowDigits on the low digits, and from word kOwnWeights on the weights of
  // type T. The digits for other runs follow. These distances avoid bank
  // conflicts when lanes store the columns of sums and load the rows of an
  // operand.
  static constexpr int32_t kLowDigits = 528;
  static constexpr int32_t kOwnWeights = 260;
  static_assert(kLowDigits + kSplit <= 4 * kOwnWeights);
  static_assert(4 * kOwnWeights + 2 * kSplit == kMmaScoreBytes);
  static_assert(kLowDigits + kSplit <= kMmaDigitBytes);

  KVASIR_DEVICE explicit MmaRows(const AttentionKernelArgs& args)
      : Ring(args),
        score_stride_(static_cast<int32_t>(MmaScoreBytes(args.device) / 4)),
        q_stride_(static_cast<int32_t>(args.device.query_stride)),
        digit_stride_(static_cast<int32_t>(args.device.digit_stride)),
        g_(static_cast<int32_t>(simt::Lane() / 4)),
        c_(static_cast<int32_t>(simt::Lane() % 4)) {
    char* next = reinterpret_cast<char*>(Scores());
    const auto take = [&next](int64_t bytes) {
      char* const taken = next;
      next += bytes;
      return taken;
    };
    const auto take_floats = [&](int64_t count) {
      return reinterpret_cast<float*>(take(4 * count));
    };
    take_floats(kRows * score_stride_);
    ring_ =
        static_cast<int32_t>(take(kWarps * kStages * device_.warp_stage_bytes) -
                             simt::Shared()) +
        warp_ * kStages * device_.warp_stage_bytes;
    params_ = reinterpret_cast<uint32_t*>(
        take(4 * kSplit * (device_.most_key_runs + device_.most_value_runs)));
    q_ = reinterpret_cast<uint16_t*>(
        take(device_.stages_numbers ? kRows * q_stride_ * 2 : 0));
    digits_ = take(2 * kRows * digit_stride_);
    query_units_ = take_floats(device_.most_key_chunks * kRows);
    query_sums_ = take_floats(device_.most_key_runs * kRows);
    weight_units_ = take_floats(device_.most_value_runs * kBlocks * kRows);
    minima_ = take_floats(device_.most_value_runs * kRows);
    sums_ = take_floats(kRows * device_.out_width);
    key_angles_ = reinterpret_cast<float*>(next);
    // Lane 8m + r passes the address of row r of matrix m to LoadMatrices.
    weights_ = Scores() + lane_ % 8 * score_stride_ + lane_ / 8 * 4;
    weight_digits_ = reinterpret_cast<const char*>(
                         Scores() + lane_ % 8 / 2 * 2 * score_stride_) +
                     lane_ % 2 * kLowDigits + lane_ / 8 * 16;
  }

  // The first parts of shared memory have fixed addresses, which take no
  // registers: Places(), the index of the CTA's next item, the results of
  // EndSoftmax [4][rows], and the scores [columns][score_stride_].
  static KVASIR_DEVICE uint32_t* NextItem() {
    return reinterpret_cast<uint32_t*>(simt::Shared() + kSplit * 8);
  }
  static KVASIR_DEVICE float* Factors() {
    return reinterpret_cast<float*>(simt::Shared() + kSplit * 8 +
                                    kMmaNextBytes);
  }
  static KVASIR_DEVICE float* Scores() { return Factors() + 4 * kRows; }

  // Returns the row to which column n of tile n / 8 belongs, and the reverse.
  static KVASIR_DEVICE int32_t RowOfColumn(int32_t n) {
    return n / 8 * 8 + n % 8 / 2 + n % 2 * 4;
  }
  static KVASIR_DEVICE int32_t ColumnOfRow(int32_t row) {
    return row / 8 * 8 + row % 4 * 2 + row / 4 % 2;
  }
  // Returns whether the item has no rows in tile t of 4 rows, or tile n of 8.
  KVASIR_DEVICE bool LacksRowTile(int32_t t) const {
    return t > 0 && rows_ <= 4 * t;
  }
  KVASIR_DEVICE bool LacksTile(int32_t n) const {
    return n > 0 && rows_ <= 8 * n;
  }
  KVASIR_DEVICE SplitKeyBias<T, kHasCodes> key_bias() const {
    return {args_, key_angles_};
  }

  // ---- queries

  // Stages the queries of the item. Each warp stages one row at a time.
  KVASIR_DEVICE void FillQueries() const {
    for (int32_t k = 0; k < chunks_.keys; ++k) {
      const LatentChunkOnDevice& chunk = ChunkOf(k);
      KVASIR_UNROLL
      for (int32_t i = 0; i < kWarpRows; ++i) {
        const int32_t row = warp_ + kWarps * i;
        if (row >= rows_) break;
        const uint16_t* const from =
            static_cast<const uint16_t*>(args_.q) +
            RowStart(args_, item_, row, chunk.head_column,
                     device_.q_row_stride) +
            chunk.channel;
        if (kHasNumbers && (exact || HasNumbers(chunk))) {
          StageNumbers(chunk, row, from);
        }
        if (!HasNumbers(chunk)) StageDigits(chunk, k, row, from);
      }
    }
  }
  KVASIR_DEVICE void StageNumbers(const LatentChunkOnDevice& chunk, int32_t row,
                                  const uint16_t* from) const {
    const int32_t padded = (chunk.channels + 15) / 16 * 16;
    uint16_t* const to = q_ + ColumnOfRow(row) * q_stride_ + chunk.column;
    KVASIR_NO_UNROLL
    for (int32_t c = lane_; c < padded; c += 32) {
      simt::StoreShared(
          to + StagedAt(KindOf(chunk), c),
          c < chunk.channels ? simt::LoadGlobal(from + c) : uint16_t{0});
    }
  }
  // Stages the digits of a row's query for chunk `k`, and adds its numbers to
  // the sum of the run.
  KVASIR_DEVICE void StageDigits(const LatentChunkOnDevice& chunk, int32_t k,
                                 int32_t row, const uint16_t* from) const {
    constexpr auto kMost = static_cast<int32_t>(kDigitChannels / simt::kWarp);
    float q[kMost];
    uint32_t most = 0;
    float sum = 0.0f;
    KVASIR_UNROLL
    for (int32_t i = 0; i < kMost; ++i) {
      const int32_t c = lane_ + 32 * i;
      q[i] = c < chunk.channels
                 ? simt::ToFloat(simt::BitsAs<T>(simt::LoadGlobal(from + c)))
                 : 0.0f;
      float of_minimum = q[i];
      if (HasStaticRanges(chunk) && c < chunk.channels) {
        of_minimum *= simt::LoadGlobal(chunk.channel_minima + c);
        q[i] *= simt::LoadGlobal(chunk.channel_scales + c);
      }
      const uint32_t size = simt::BitsAs<uint32_t>(q[i]) & 0x7fffffffu;
      most = size > most ? size : most;
      sum += of_minimum;
    }
    sum = simt::WarpSum(sum);
    KVASIR_UNROLL
    for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
      const uint32_t other = simt::ShuffleXor(most, lanes);
      most = other > most ? other : most;
    }
    const DigitUnit unit = DigitUnit::Of(most);
    char* const high = digits_ + 2 * row * digit_stride_ + chunk.digit_column;
    KVASIR_UNROLL
    for (int32_t i = 0; i < kMost; ++i) {
      if (i % 2 == 0 && 32 * i >= chunk.channels) break;
      const int32_t c = lane_ + 32 * i;
      char* const to = high + c / 64 * 64 + DigitPlace(KindOf(chunk), c % 64);
      const uint32_t raw = RawDigits(q[i], unit.inverse);
      simt::StoreShared(to, static_cast<char>(raw >> 8));
      simt::StoreShared(to + digit_stride_, static_cast<char>(raw ^ 0x80u));
    }
    if (lane_ != 0) return;
    const float scale = kScaledDigits ? device_.scale * simt::kLog2E : 1.0f;
    // ScoreCodes computes 16 times the sums of codes of at most 4 bits that
    // have no levels.
    const ChunkKind what = KindOf(chunk);
    const float step = what == ChunkKind::kCodes4 || what == ChunkKind::kCodes3
                           ? 0.0625f * chunk.step
                           : chunk.step;
    simt::StoreShared(query_units_ + k * kRows + row, unit.unit * step * scale);
    float* const total = query_sums_ + chunk.run * kRows + row;
    sum *= scale;
    simt::StoreShared(total,
                      chunk.starts_run ? sum : simt::LoadShared(total) + sum);
  }
  // Returns the staged query of the row that this lane loads in tile n.
  KVASIR_DEVICE const uint16_t* QueryAt(const LatentChunkOnDevice& chunk,
                                        int32_t n) const {
    return q_ + (8 * n + g_) * q_stride_ + chunk.column;
  }
  // Returns the second operands of the two products that multiply section
  // `section` of a chunk (64 channels) by the queries of tile t of 4 rows.
  KVASIR_DEVICE simt::Vec16 QueryDigits(const LatentChunkOnDevice& chunk,
                                        int32_t section, int32_t t) const {
    return simt::LoadShared(reinterpret_cast<const simt::Vec16*>(
        digits_ + (8 * t + g_) * digit_stride_ + chunk.digit_column +
        64 * section + 16 * c_));
  }

  // ---- weights

  // Converts scores to weights (softmax). A warp computes two rows of a tile.
  // A lane has the scores of four neighbouring slots of every 128, later their
  // weights.
  KVASIR_DEVICE void Weigh(bool merged) const {
    KVASIR_NO_UNROLL
    for (int32_t row = warp_; row < rows_; row += kWarps) {
      float* const scores = Scores() + ColumnOfRow(row) * score_stride_;
      const SlotRange visible =
          Both(slots_, RowSlots(device_, *item_.sequence, item_.TokenOf(row)));
      const auto begin = static_cast<int32_t>(visible.begin - split_);
      const auto end = static_cast<int32_t>(visible.end - split_);
      const bool all = begin == 0 && end == kSplit;
      float weight[kSplit / 32];
      float max = begin < end ? kLeastMax : kNoSlot;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; k += 4) {
        const auto four = simt::LoadShared(
            reinterpret_cast<const simt::Vec16*>(scores + SlotOf(k)));
        KVASIR_UNROLL
        for (int32_t i = 0; i < 4; ++i) {
          weight[k + i] = simt::BitsAs<float>(four.word[i]);
        }
      }
      const auto slot_of = [this](int32_t k) { return SlotOf(k); };
      key_bias().template AddTo<16>(item_, row, slot_of, weight);
      if (!all) {
        KVASIR_UNROLL
        for (int32_t k = 0; k < kSplit / 32; ++k) {
          if (SlotOf(k) < begin || SlotOf(k) >= end) weight[k] = kHidden;
        }
      }
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        max = simt::Max(max, weight[k]);
      }
      max = simt::WarpMax(max);
      float sum = 0.0f;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        weight[k] = simt::Exp2(weight[k] - max);
        sum += weight[k];
      }
      sum = simt::WarpSum(sum);
      simt::SyncWarp();
      StoreWeights(row, scores, weight);
      if (lane_ == 0) {
        EndSoftmax(args_, item_, row, {max, sum}, merged, Factors() + row,
                   kRows);
      }
    }
  }
  // Returns the slot of the lane's weight k.
  KVASIR_DEVICE int32_t SlotOf(int32_t k) const {
    return k / 4 * 128 + 4 * lane_ + k % 4;
  }
  // Stores the weights of a row: digits for each run of codes, and numbers of
  // type T for unquantized values and exact rows. Weights of exact rows are
  // negative in T and 0 in digits.
  KVASIR_DEVICE void StoreWeights(int32_t row, float* scores,
                                  float (&weight)[kSplit / 32]) const {
    if constexpr (exact) {
      if (values_.any_exact()) {
        const CodecSlots codec =
            ReadAsCodes(/*of_keys=*/false, item_.TokenIn(row));
        KVASIR_UNROLL
        for (int32_t k = 0; k < kSplit / 32; ++k) {
          if (!codec.Has(SlotOf(k))) weight[k] = -weight[k];
        }
      }
    }
    if constexpr (kHasNumbers) {
      auto* const to =
          reinterpret_cast<uint64_t*>(scores + kOwnWeights) + lane_;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; k += 4) {
        simt::StoreShared(
            to + 8 * k,
            simt::MakePair<T>(weight[k], weight[k + 1]) |
                uint64_t{simt::MakePair<T>(weight[k + 2], weight[k + 3])}
                    << 32);
      }
    }
    if (!kHasCodes || ValueBlocks().none()) return;
    if constexpr (exact) {
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        weight[k] = weight[k] > 0.0f ? weight[k] : 0.0f;
      }
    }
    ForRuns(/*of_keys=*/false, [&](const LatentChunkOnDevice& run) {
      StoreDigits(run, row,
                  reinterpret_cast<char*>(scores) + RunDigits(run.run), weight);
    });
  }
  // Returns the offset, in a row of scores, of the digits for a run of values.
  static KVASIR_DEVICE int32_t RunDigits(int32_t run) {
    constexpr auto kFirst = static_cast<int32_t>(kMmaScoreBytes);
    constexpr auto kEach = static_cast<int32_t>(kMmaDigitBytes);
    return run == 0 ? 0 : kFirst + (run - 1) * kEach;
  }
  // Multiplies a row's weights by the scales of a run, and stores the digits
  // and units of the products. Also stores the sum of weight * minimum.
  KVASIR_DEVICE void StoreDigits(const LatentChunkOnDevice& run, int32_t row,
                                 char* high,
                                 const float (&weight)[kSplit / 32]) const {
    float* const units = weight_units_ + run.run * kBlocks * kRows + row;
    const bool levels = HasLevels(KindOf(run));
    float minima = 0.0f;
    // Each turn takes 256 slots: of two groups of 128 slots, four slots per
    // lane. 16 lanes have a block.
    KVASIR_UNROLL
    for (int32_t k = 0; k < kSplit / 32; k += 8) {
      float scaled[8];
      float largest[2] = {};
      KVASIR_UNROLL
      for (int32_t i = 0; i < 8; i += 4) {
        // The scales of two slots, their minima, and the same of two others.
        const auto params = simt::LoadShared(
            reinterpret_cast<const simt::Vec16*>(ValueParams(run)) +
            (k + i) / 4 * 32 + lane_);
        KVASIR_UNROLL
        for (int32_t j = 0; j < 4; ++j) {
          const float w = weight[k + i + j];
          const auto half = [&](uint32_t pair) {
            return j % 2 == 0 ? LowHalf(pair) : HighHalf(pair);
          };
          scaled[i + j] = w * half(params.word[j / 2 * 2]);
          largest[i / 4] = simt::Max(largest[i / 4], std::fabs(scaled[i + j]));
          if (!levels) {
            minima = simt::Fma(w, half(params.word[j / 2 * 2 + 1]), minima);
          }
        }
      }
      // The unit depends only on the upper half of a float32. Two such halves
      // are compared at once, as float16 numbers: with the sign bit set, the
      // largest magnitude is the smallest number.
      uint32_t most =
          simt::PickBytes(simt::BitsAs<uint32_t>(largest[0]),
                          simt::BitsAs<uint32_t>(largest[1]), 0x7632u) |
          0x80008000u;
      KVASIR_UNROLL
      for (uint32_t lanes = 8; lanes > 0; lanes /= 2) {
        most = simt::MinPair(most, simt::ShuffleXor(most, lanes));
      }
      KVASIR_UNROLL
      for (int32_t i = 0; i < 8; i += 4) {
        const DigitUnit unit =
            DigitUnit::Of((i == 0 ? most << 16 : most) & 0x7fff0000u);
        uint32_t pairs[2];  // high digits of two slots, then their low digits
        KVASIR_UNROLL
        for (int32_t j = 0; j < 2; ++j) {
          pairs[j] = simt::PickBytes(
              RawDigits(scaled[i + 2 * j], unit.inverse),
              RawDigits(scaled[i + 2 * j + 1], unit.inverse), 0x4051u);
        }
        const int32_t four = (k + i) / 4;
        auto* const to = reinterpret_cast<uint32_t*>(high) + 32 * four + lane_;
        simt::StoreShared(to, simt::PickBytes(pairs[0], pairs[1], 0x5410u));
        simt::StoreShared(
            to + kLowDigits / 4,
            simt::PickBytes(pairs[0], pairs[1], 0x7632u) ^ 0x80808080u);
        if (lane_ % 16 == 0) {
          simt::StoreShared(units + (2 * four + lane_ / 16) * kRows,
                            unit.unit * run.step);
        }
      }
    }
    if (levels) return;
    minima = simt::WarpSum(minima);
    if (lane_ == 0) {
      simt::StoreShared(minima_ + run.run * kRows + row, minima);
    }
  }
  // Loads the digits of a block's weights for the rows of tile t of 4 rows:
  // the second operands of two products of 32 slots.
  KVASIR_DEVICE void WeightDigits(const LatentChunkOnDevice& chunk,
                                  int32_t block, int32_t t,
                                  uint32_t (&b)[4]) const {
    simt::LoadMatrices<4>(b, weight_digits_ +
                                 (t / 2 * 8 + t % 2) * score_stride_ * 4 +
                                 RunDigits(chunk.run) + block * kBlock);
  }
  KVASIR_DEVICE float WeightUnit(const LatentChunkOnDevice& chunk,
                                 int32_t block, int32_t t) const {
    return simt::LoadShared(weight_units_ +
                            (chunk.run * kBlocks + block) * kRows + 4 * t + c_);
  }
  // Loads the weights of slots [32k, 32k + 32) of a block for the rows of tile
  // n, as numbers. They are the second operands of two products of 16 slots.
  KVASIR_DEVICE void Weights(int32_t block, int32_t k, int32_t n,
                             uint32_t (&b)[4]) const {
    simt::LoadMatrices<4>(b, weights_ + 8 * n * score_stride_ + kOwnWeights +
                                 block * kBlock / 2 + 16 * k);
  }

  const int32_t score_stride_;  // in words
  const int32_t q_stride_;
  const int32_t digit_stride_;
  const int32_t g_, c_;  // lane / 4, lane % 4

  // The places in Scores() whose addresses this lane passes to LoadMatrices: of
  // weights as numbers, and of digits for tile 0 of 4 rows.
  const float* weights_;
  const char* weight_digits_;
  uint16_t* q_;          // [columns][q_stride_]: queries as numbers
  char* digits_;         // [rows][2][digit_stride_]: digits of queries
  float* query_units_;   // [chunks of keys][rows]
  float* query_sums_;    // [runs of keys][rows]
  float* weight_units_;  // [runs of values][blocks][rows]
  float* minima_;        // [runs of values][rows]: sums of weight * minimum
  float* sums_;          // [rows][out_width]
  float* key_angles_;    // for SplitKeyBias
  int32_t rows_;         // rows of the item
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
