// Computes attention for an item (attention_items.h) with plain multiply-adds,
// for any codec and any type of activations. C++17, device code.
//
// A CTA of 128 threads computes a split of 512 slots in three passes: all
// scores, the softmax, all values. Slots are read in blocks of 64 and channels
// in chunks of 64. They are decoded to float32 in shared memory: a code becomes
// fma(code, scale, minimum). Each thread computes one slot (or one channel of
// the values) for half of the rows.
//
// Cost: an item reads its latents once for up to 16 rows, with a load for each
// number or code. To rebuild keys or lift values, the CTA first multiplies the
// latents of a block by the rows (or columns) of `up` that a chunk needs. That
// takes two loads per multiply-add, and the latents are decoded again for each
// 64 numbers of a key or value. The passes over keys and over values each have
// 9 loads from shared memory per 8 multiply-adds, and about 20 instructions per
// code. So this kernel is far slower than the hardware allows. It is meant for
// float32, capped scores, and codecs that tensor cores do not support.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/attention_key_bias.h"
#include "kernels/attention/cuda/attention_latents.h"
#include "kernels/simt/activations.h"
#include "kernels/simt/grid.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kPlainThreads = 128;

template <typename T>
class PlainAttention {
 public:
  static constexpr int32_t kRows = static_cast<int32_t>(kDeviceTileRows);
  static constexpr int32_t kBlock = static_cast<int32_t>(kAttentionBlockSlots);
  static constexpr int32_t kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  static constexpr int32_t kChunk = 64;
  static constexpr int32_t kTileStride = kChunk + 1;  // avoids bank conflicts

  KVASIR_DEVICE explicit PlainAttention(const AttentionKernelArgs& args)
      : args_(args), device_(args.device) {
    auto* const floats = reinterpret_cast<float*>(simt::Shared());
    weights_ = floats;
    tile_ = weights_ + kRows * kSplit;
    q_ = tile_ + kBlock * kTileStride;
    factors_ = q_ + kRows * kChunk;
    pages_ = reinterpret_cast<int32_t*>(factors_ + 4 * kRows);
    key_angles_ = factors_ + 4 * kRows + kBlock;
    lifted_ = key_angles_ + device_.key_bias.shared_bytes() / 4;
    sums_ = lifted_ + (device_.lifts ? kBlock * kTileStride : 0);
    lane_ = static_cast<int32_t>(simt::Thread()) % kBlock;
    first_row_ = static_cast<int32_t>(simt::Thread()) / kBlock * kHalf;
  }

  KVASIR_DEVICE void Compute(const Item& item) {
    Begin(item);
    for (int32_t s = 0; s < item.num_splits; ++s) {
      if (item.partial >= 0) item_.partial = item.partial + s;
      // A partial result must be written even if the item sees no slot of the
      // split.
      if (!Enter(item.first_split + s) && item.partial < 0) continue;
      WeighSplit();
      Sum();
      Continue();
    }
    if (item.partial < 0) Finish();
  }

  // The steps of Compute that attention mass needs, too. All threads must call
  // them. Begin starts an item. Enter starts a split, and returns whether the
  // item sees one of its slots. WeighSplit computes the split's weights and
  // totals. Continue makes the totals of the next split include this split.
  KVASIR_DEVICE void Begin(const Item& item) {
    item_ = item;
    kv_head_ = Quotient(device_.heads[item.unit.first_head],
                        Quotient(device_.num_heads, device_.num_kv_heads));
    seen_ =
        RowsSlots(device_, *item.sequence, item.first_token, item.num_tokens);
    merged_ = false;
  }
  KVASIR_DEVICE bool Enter(int64_t split) {
    slots_ = Both(SplitSlots(split), seen_);
    if (slots_.end <= slots_.begin) slots_ = {0, 0};
    split_ = split * kSplit;
    return slots_.end > 0;
  }
  KVASIR_DEVICE void WeighSplit() {
    Score();
    if (!device_.stored_positions) {
      SplitKeyBias<T>(args_, key_angles_)
          .Fill(item_, split_, int32_t{kPlainThreads});
    }
    simt::SyncCta();
    Weigh();
  }
  KVASIR_DEVICE void Continue() { merged_ = item_.partial < 0; }

  // Only after WeighSplit and a barrier, and only if the item writes no partial
  // results. The weight of slot `i` of the split, relative to the greatest
  // score of the split; and the totals of a row, which are not set if the item
  // saw no slot.
  KVASIR_DEVICE float WeightOf(int32_t row, int32_t i) const {
    const float weight = simt::LoadShared(weights_ + row * kSplit + i);
    return weight < 0.0f ? -weight : weight;
  }
  KVASIR_DEVICE RowTotal TotalOf(int32_t row) const {
    return {simt::LoadShared(factors_ + 3 * kRows + row),
            simt::LoadShared(factors_ + 2 * kRows + row)};
  }
  // The shared memory that only Compute uses, and that follows all other.
  KVASIR_DEVICE float* memory_for_sums() const { return sums_; }

 private:
  static constexpr int32_t kHalf = kRows / 2;
  static constexpr int32_t kWarpRows =
      kRows / static_cast<int32_t>(kPlainThreads / simt::kWarp);
  static_assert(4 * (kRows * kSplit + kBlock * kTileStride + kRows * kChunk +
                     4 * kRows + kBlock) ==
                kPlainFixedBytes);
  static_assert(4 * kBlock * kTileStride == kPlainLiftBytes);

  // Calls visit with the first slot of each block of the split that has visible
  // slots.
  template <typename Visit>
  KVASIR_DEVICE void ForBlocks(const Visit& visit) const {
    for (int64_t block = slots_.begin / kBlock * kBlock; block < slots_.end;
         block += kBlock) {
      visit(block);
    }
  }

  // Fills pages_ with the page of each slot of the block, or -1 if no row sees
  // the slot. There must be a barrier between the last read of the previous
  // block's pages and this call.
  KVASIR_DEVICE void FindPages(int64_t block) {
    if (static_cast<int32_t>(simt::Thread()) >= kBlock) return;
    const int64_t slot = block + lane_;
    int32_t page = -1;
    if (slot >= slots_.begin && slot < slots_.end) {
      const auto* const table =
          simt::BitsAs<const int32_t*>(item_.sequence->block_table);
      page = simt::LoadGlobal(table + Quotient(slot, device_.page_tokens));
    }
    simt::StoreShared(pages_ + lane_, page);
  }

  // Returns whether at least one row reads the visible slot `slot` as an exact
  // row (if `as_exact`) or as a latent (otherwise).
  KVASIR_DEVICE bool Reads(const ExactSlots& exact, bool as_exact,
                           int64_t slot) const {
    const int64_t first = item_.sequence->first_slot + item_.first_token;
    return as_exact ? exact.Has(first, slot)
                    : !exact.Has(first + item_.num_tokens - 1, slot);
  }
  // Returns whether Reads is true for at least one visible slot of the block.
  KVASIR_DEVICE bool ReadsBlock(const ExactSlots& exact, bool as_exact,
                                int64_t block) const {
    const SlotRange slots = Both(slots_, {block, block + kBlock});
    // It suffices to test three slots: the first and the last visible slot of
    // the block and, for latents, the first slot after the sinks.
    return Reads(exact, as_exact, slots.begin) ||
           Reads(exact, as_exact, slots.end - 1) ||
           (!as_exact && slots.begin < exact.sinks && exact.sinks < slots.end &&
            Reads(exact, false, exact.sinks));
  }

  // Returns how many numbers a key or value of this part has.
  KVASIR_DEVICE int32_t WidthOf(const DevicePart& part) const {
    if (part.lift.dims > 0) return static_cast<int32_t>(part.lift.dims);
    return static_cast<int32_t>(
        part.latents.groups[part.group_of_head[kv_head_]].width);
  }
  // Returns which number of a key or value is computed in place `i`.
  KVASIR_DEVICE static int32_t NumberAt(const int32_t* order, int32_t i) {
    return order == nullptr ? i : simt::LoadGlobal(order + i);
  }

  // Computes the numbers [first, first + count) of the keys or values of the
  // block's slots, and returns their tile [64][kTileStride]. A barrier must
  // follow before other threads read it.
  KVASIR_DEVICE const float* FillNumbers(const DevicePart& part,
                                         const ExactSlots& exact, bool as_exact,
                                         int64_t block, int32_t first,
                                         int32_t count) {
    const DeviceLift& lift = part.lift;
    if (lift.dims == 0 || lift.up == nullptr) {
      FillTile(part, exact, as_exact, block, first, count, lift.order);
      if (lift.dims == 0) return tile_;
      // Now each thread can read the numbers that others decoded.
      simt::SyncCta();
      ForOwn(count, [&](int32_t i) {
        simt::StoreShared(lifted_ + lane_ * kTileStride + i,
                          simt::LoadShared(tile_ + lane_ * kTileStride + i));
      });
    } else {
      Lift(part, exact, as_exact, block, first, count);
    }
    if (lift.bias != nullptr) {
      ForOwn(count, [&](int32_t i) {
        float* const number = lifted_ + lane_ * kTileStride + i;
        simt::StoreShared(
            number, simt::LoadShared(number) +
                        simt::LoadGlobal(lift.bias + kv_head_ * lift.dims +
                                         NumberAt(lift.order, first + i)));
      });
    }
    Turn(lift, block, first, count);
    return lifted_;
  }
  // Calls visit(i) for each number i < count of a chunk that this thread
  // computes. One thread computes both numbers of a pair.
  template <typename Visit>
  KVASIR_DEVICE void ForOwn(int32_t count, const Visit& visit) const {
    constexpr auto kEach = static_cast<int32_t>(kPlainThreads) / kBlock;
    KVASIR_NO_UNROLL
    for (int32_t i = static_cast<int32_t>(simt::Thread()) / kBlock * 2;
         i < count; i += 2 * kEach) {
      visit(i);
      if (i + 1 < count) visit(i + 1);
    }
  }
  // Multiplies the latents of the block's slots by `up`.
  KVASIR_DEVICE void Lift(const DevicePart& part, const ExactSlots& exact,
                          bool as_exact, int64_t block, int32_t first,
                          int32_t count) {
    const DeviceLift& lift = part.lift;
    const float* const up = lift.up[kv_head_];
    const auto width = static_cast<int32_t>(
        part.latents.groups[part.group_of_head[kv_head_]].width);
    const int64_t number_stride = lift.of_values ? 1 : width;
    const int64_t channel_stride = lift.of_values ? lift.dims : 1;
    for (int32_t channel = 0; channel < width; channel += kChunk) {
      const int32_t channels =
          width - channel < kChunk ? width - channel : kChunk;
      // No thread uses the previous tile any more.
      if (channel > 0) simt::SyncCta();
      FillTile(part, exact, as_exact, block, channel, channels, nullptr);
      simt::SyncCta();
      ForOwn(count, [&](int32_t i) {
        const float* const factors =
            up + NumberAt(lift.order, first + i) * number_stride +
            channel * channel_stride;
        float* const number = lifted_ + lane_ * kTileStride + i;
        float sum = channel > 0 ? simt::LoadShared(number) : 0.0f;
        KVASIR_NO_UNROLL
        for (int32_t c = 0; c < channels; ++c) {
          sum =
              simt::Fma(simt::LoadGlobal(factors + c * channel_stride),
                        simt::LoadShared(tile_ + lane_ * kTileStride + c), sum);
        }
        simt::StoreShared(number, sum);
      });
    }
  }
  // Returns the position of a slot of the block whose pages FindPages found.
  KVASIR_DEVICE int64_t PositionOf(int64_t slot) const {
    if (device_.stored_positions) {
      const int32_t page = simt::LoadShared(pages_ + lane_);
      return simt::LoadGlobal(
          PositionsOf(device_.metadata, page, device_.unit_of_head[kv_head_]) +
          Remainder(slot, device_.page_tokens));
    }
    const auto* const positions =
        simt::BitsAs<const int64_t*>(item_.sequence->positions);
    return positions == nullptr ? slot : simt::LoadGlobal(positions + slot);
  }
  // Rotates the pairs of a chunk of keys. A chunk begins with an even number of
  // the order, so it has both numbers of each of its pairs.
  KVASIR_DEVICE void Turn(const DeviceLift& lift, int64_t block, int32_t first,
                          int32_t count) {
    if (simt::LoadShared(pages_ + lane_) < 0) return;
    const int64_t position = PositionOf(block + lane_);
    ForOwn(count, [&](int32_t i) {
      const int64_t pair = (first + i) / 2;
      if (i % 2 != 0 || pair >= lift.num_pairs) return;
      const UnitVector at = UnitVectorAt(
          simt::LoadGlobal(lift.steps + kv_head_ * lift.head_steps_stride +
                           pair) *
          static_cast<uint64_t>(position));
      const float cosine = at.cosine * lift.attention_factor;
      const float sine = at.sine * lift.attention_factor;
      float* const numbers = lifted_ + lane_ * kTileStride + i;
      const float a = simt::LoadShared(numbers);
      const float b = simt::LoadShared(numbers + 1);
      simt::StoreShared(numbers, simt::Fma(a, cosine, -(b * sine)));
      simt::StoreShared(numbers + 1, simt::Fma(b, cosine, a * sine));
    });
  }

  // Decodes a part's channels in places [first, first + channels) of `order`
  // (null: ascending order) of the block's slots into the tile
  // [64][kTileStride]. Slots for which Reads is false get zeros.
  KVASIR_DEVICE void FillTile(const DevicePart& part, const ExactSlots& exact,
                              bool as_exact, int64_t block, int32_t first,
                              int32_t channels, const int32_t* order) {
    const int32_t page = simt::LoadShared(pages_ + lane_);
    const int64_t g = part.group_of_head[kv_head_];
    const int64_t slot = block + lane_;
    const bool reads = page >= 0 && Reads(exact, as_exact, slot);
    const LatentPartArgs& rows =
        slot < item_.sequence->first_slot ? part.exact.ring : part.exact.fresh;
    SlotPlace place = {};
    if (reads) {
      place = as_exact ? ExactPlaceOf(exact, part.exact, *item_.sequence, slot)
                       : PlaceOf(part.latents, page,
                                 Remainder(slot, device_.page_tokens));
    }
    KVASIR_NO_UNROLL
    for (int32_t c = static_cast<int32_t>(simt::Thread()) / kBlock;
         c < channels; c += static_cast<int32_t>(kPlainThreads) / kBlock) {
      float number = 0.0f;
      if (reads) {
        const int32_t channel = NumberAt(order, first + c);
        number = as_exact ? ExactNumber(rows, g, place, channel)
                          : LatentNumber(part, g, place, channel);
      }
      simt::StoreShared(tile_ + lane_ * kTileStride + c, number);
    }
  }

  KVASIR_DEVICE void FillQueries(const DevicePart& part, int32_t first,
                                 int32_t channels) {
    KVASIR_NO_UNROLL
    for (auto i = static_cast<int32_t>(simt::Thread()); i < kRows * kChunk;
         i += static_cast<int32_t>(kPlainThreads)) {
      const int32_t row = i / kChunk;
      const int32_t c = i % kChunk;
      float number = 0.0f;
      if (row < item_.rows() && c < channels) {
        const T* const numbers =
            static_cast<const T*>(args_.q) +
            RowStart(args_, item_, row, part.column, device_.q_row_stride);
        number = simt::ToFloat(
            simt::LoadGlobal(numbers + NumberAt(part.lift.order, first + c)));
      }
      simt::StoreShared(q_ + i, number);
    }
  }

  // Computes the scores of all slots that some row sees, times log2(e), and
  // stores them in weights_.
  KVASIR_DEVICE void Score() {
    ForBlocks([&](int64_t block) {
      FindPages(block);
      float scores[kHalf] = {};
      AddScores(block, /*as_exact=*/false, scores);
      float of_exact[kHalf] = {};
      AddScores(block, /*as_exact=*/true, of_exact);
      float of_bias[kHalf] = {};
      if (device_.stored_positions && device_.key_bias.steps != nullptr) {
        AddKeyBias(block, of_bias);
      }
      KVASIR_UNROLL
      for (int32_t r = 0; r < kHalf; ++r) {
        const int32_t row = first_row_ + r;
        const bool exact = HasExact(device_.key_exact, row, block + lane_);
        simt::StoreShared(weights_ + row * kSplit + (block - split_) + lane_,
                          simt::Fma(of_bias[r], device_.key_bias.unit,
                                    exact ? of_exact[r] : scores[r]) *
                              (device_.scale * simt::kLog2E));
      }
    });
  }
  KVASIR_DEVICE bool HasExact(const ExactSlots& exact, int32_t row,
                              int64_t slot) const {
    return exact.Has(item_.sequence->first_slot + item_.TokenOf(row), slot);
  }
  // Adds the products of queries and keys to the scores: keys read as exact
  // rows if `as_exact`, otherwise latents. Does nothing if no row reads the
  // block in this form.
  KVASIR_DEVICE void AddScores(int64_t block, bool as_exact,
                               float (&scores)[kHalf]) {
    if (!ReadsBlock(device_.key_exact, as_exact, block)) return;
    for (int64_t p = 0; p < device_.num_key_parts; ++p) {
      const DevicePart& part = device_.keys[p];
      const int32_t width = WidthOf(part);
      for (int32_t first = 0; first < width; first += kChunk) {
        const int32_t channels =
            width - first < kChunk ? width - first : kChunk;
        // After this barrier, all threads can read the pages, and none uses the
        // previous tile any more.
        simt::SyncCta();
        const float* const keys = FillNumbers(part, device_.key_exact, as_exact,
                                              block, first, channels);
        FillQueries(part, first, channels);
        simt::SyncCta();
        AddProducts(keys, channels, scores);
      }
    }
  }
  // Adds the products of the first `count` numbers of queries and keys.
  KVASIR_DEVICE void AddProducts(const float* keys, int32_t count,
                                 float (&scores)[kHalf]) const {
    for (int32_t c = 0; c < count; ++c) {
      const float number = simt::LoadShared(keys + lane_ * kTileStride + c);
      KVASIR_UNROLL
      for (int32_t r = 0; r < kHalf; ++r) {
        scores[r] =
            simt::Fma(simt::LoadShared(q_ + (first_row_ + r) * kChunk + c),
                      number, scores[r]);
      }
    }
  }

  // Adds the key bias at the positions that the block's slots store. The
  // cosines and sines of the pairs' angles take the place of a key.
  KVASIR_DEVICE void AddKeyBias(int64_t block, float (&scores)[kHalf]) {
    const DeviceKeyBias& bias = device_.key_bias;
    const int32_t pairs = bias.tile_pairs + bias.exact_pairs;
    constexpr int32_t kPairs = kChunk / 2;
    for (int32_t first = 0; first < pairs; first += kPairs) {
      const int32_t count = pairs - first < kPairs ? pairs - first : kPairs;
      // As in AddScores.
      simt::SyncCta();
      FillAngles(block, first, count);
      FillBiasQueries(first, count);
      simt::SyncCta();
      AddProducts(tile_, 2 * count, scores);
    }
  }
  KVASIR_DEVICE void FillAngles(int64_t block, int32_t first, int32_t count) {
    const DeviceKeyBias& bias = device_.key_bias;
    const uint64_t* const steps =
        bias.steps + kv_head_ * (bias.tile_pairs + bias.exact_pairs);
    const bool has_slot = simt::LoadShared(pages_ + lane_) >= 0;
    const int64_t position = has_slot ? PositionOf(block + lane_) : 0;
    ForOwn(2 * count, [&](int32_t i) {
      if (i % 2 != 0) return;
      const int32_t pair = first + i / 2;
      const int64_t angle =
          pair < bias.tile_pairs ? KeyBiasCentre(position) : position;
      const UnitVector at = UnitVectorAt(simt::LoadGlobal(steps + pair) *
                                         static_cast<uint64_t>(angle));
      float* const numbers = tile_ + lane_ * kTileStride + i;
      simt::StoreShared(numbers, at.cosine);
      simt::StoreShared(numbers + 1, at.sine);
    });
  }
  KVASIR_DEVICE void FillBiasQueries(int32_t first, int32_t count) {
    const DeviceKeyBias& bias = device_.key_bias;
    KVASIR_NO_UNROLL
    for (auto i = static_cast<int32_t>(simt::Thread()); i < kRows * kChunk;
         i += static_cast<int32_t>(kPlainThreads)) {
      const int32_t row = i / kChunk;
      const int32_t pair = first + i % kChunk / 2;
      float number = 0.0f;
      if (row < item_.rows() && i % kChunk < 2 * count) {
        const T* const numbers =
            static_cast<const T*>(args_.q) +
            RowStart(args_, item_, row, bias.column, device_.q_row_stride);
        const int32_t exact = pair - bias.tile_pairs;
        number = simt::ToFloat(simt::LoadGlobal(
            numbers + (exact < 0 ? pair + i % 2 * bias.tile_pairs
                                 : bias.tile_columns + 2 * exact + i % 2)));
      }
      simt::StoreShared(q_ + i, number);
    }
  }

  // Converts scores to weights (softmax). Each warp computes four rows.
  KVASIR_DEVICE void Weigh() {
    const auto warp = static_cast<int32_t>(simt::Warp());
    const auto lane = static_cast<int32_t>(simt::Lane());
    for (int32_t i = 0; i < kWarpRows; ++i) {
      const int32_t row = warp * kWarpRows + i;
      SlotRange visible = {0, 0};
      if (row < item_.rows()) {
        visible = Both(slots_,
                       RowSlots(device_, *item_.sequence, item_.TokenOf(row)));
      }
      float* const of_row = weights_ + row * kSplit + lane;
      float weights[kSplit / 32];
      float max = visible.begin < visible.end ? kLeastMax : kNoSlot;
      const auto sees = [&](int32_t k) {
        const int64_t slot = split_ + 32 * k + lane;
        return slot >= visible.begin && slot < visible.end;
      };
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        weights[k] = sees(k) ? simt::LoadShared(of_row + 32 * k) : kHidden;
      }
      if (!device_.stored_positions) {
        SplitKeyBias<T>(args_, key_angles_)
            .AddTo(
                item_, row, [lane](int32_t k) { return 32 * k + lane; },
                weights);
      }
      const float cap = device_.score_cap * simt::kLog2E;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        if (cap > 0.0f) weights[k] = simt::SoftCap(weights[k], cap);
        if (!sees(k)) weights[k] = kHidden;
        max = weights[k] > max ? weights[k] : max;
      }
      max = simt::WarpMax(max);
      float sum = 0.0f;
      KVASIR_UNROLL
      for (int32_t k = 0; k < kSplit / 32; ++k) {
        const float weight =
            weights[k] == kHidden ? 0.0f : simt::Exp2(weights[k] - max);
        sum += weight;
        // A negative weight marks a value that is read as an exact row.
        const bool exact =
            HasExact(device_.value_exact, row, split_ + 32 * k + lane);
        simt::StoreShared(of_row + 32 * k, exact ? -weight : weight);
      }
      sum = simt::WarpSum(sum);
      if (lane == 0) {
        EndSoftmax(args_, item_, row, {max, sum}, merged_, factors_ + row,
                   kRows);
      }
    }
  }

  // Calls visit(part, first, count, offset) for each chunk of values. The chunk
  // has the part's channels [first, first + count), and `offset` is the offset
  // of the part's sums in a row.
  template <typename Visit>
  KVASIR_DEVICE void ForValueChunks(const Visit& visit) const {
    int32_t out = 0;
    for (int64_t p = 0; p < device_.num_value_parts; ++p) {
      const DevicePart& part = device_.values[p];
      const int32_t width = WidthOf(part);
      for (int32_t first = 0; first < width; first += kChunk) {
        visit(part, first, width - first < kChunk ? width - first : kChunk,
              out);
      }
      out += width;
    }
  }

  KVASIR_DEVICE void Sum() {
    ForValueChunks([&](const DevicePart& part, int32_t first, int32_t channels,
                       int32_t out) {
      float sums[kHalf] = {};
      ForBlocks([&](int64_t block) {
        FindPages(block);
        AddValues(part, block, /*as_exact=*/false, first, channels, sums);
        AddValues(part, block, /*as_exact=*/true, first, channels, sums);
      });
      if (lane_ >= channels) return;
      const int32_t column = out + first + lane_;
      KVASIR_UNROLL
      for (int32_t r = 0; r < kHalf; ++r) {
        const int32_t row = first_row_ + r;
        if (row >= item_.rows()) continue;
        if (item_.partial >= 0) {
          simt::StoreGlobal(PartialRow(args_, item_, row) + column, sums[r]);
          continue;
        }
        float* const total = sums_ + row * device_.out_width + column;
        const MergeFactors factors = {simt::LoadShared(factors_ + row),
                                      simt::LoadShared(factors_ + kRows + row)};
        const float before = merged_ ? simt::LoadShared(total) : 0.0f;
        simt::StoreShared(total, MergeSum(factors, before, sums[r]));
      }
    });
  }

  KVASIR_DEVICE void AddValues(const DevicePart& part, int64_t block,
                               bool as_exact, int32_t first, int32_t channels,
                               float (&sums)[kHalf]) {
    if (!ReadsBlock(device_.value_exact, as_exact, block)) return;
    // After this barrier, all threads can read the pages and the weights, and
    // none uses the previous tile any more.
    simt::SyncCta();
    const float* const values = FillNumbers(part, device_.value_exact, as_exact,
                                            block, first, channels);
    simt::SyncCta();
    if (lane_ >= channels) return;
    for (int32_t s = 0; s < kBlock; ++s) {
      const float number = simt::LoadShared(values + s * kTileStride + lane_);
      KVASIR_UNROLL
      for (int32_t r = 0; r < kHalf; ++r) {
        const float weight = simt::LoadShared(
            weights_ + (first_row_ + r) * kSplit + (block - split_) + s);
        const float of_kind = as_exact ? -weight : weight;
        // Skips weights of 0, because an infinite or NaN value must not affect
        // a row that does not see its slot.
        if (of_kind > 0.0f) sums[r] = simt::Fma(of_kind, number, sums[r]);
      }
    }
  }

  // Divides the merged sums by the sums of weights and writes the output rows.
  // Each thread reads only sums that it wrote itself, so no barrier is needed.
  KVASIR_DEVICE void Finish() {
    ForValueChunks([&](const DevicePart& part, int32_t first, int32_t channels,
                       int32_t out) {
      if (lane_ >= channels) return;
      KVASIR_UNROLL
      for (int32_t r = 0; r < kHalf; ++r) {
        const int32_t row = first_row_ + r;
        if (row >= item_.rows()) continue;
        float number = 0.0f;
        if (merged_ &&
            SeesSlots(simt::LoadShared(factors_ + 3 * kRows + row))) {
          number = simt::LoadShared(sums_ + row * device_.out_width + out +
                                    first + lane_) *
                   (1.0f / simt::LoadShared(factors_ + 2 * kRows + row));
        }
        T* const out_row =
            static_cast<T*>(args_.out) +
            RowStart(args_, item_, row, part.column, device_.out_row_stride);
        simt::StoreGlobal(out_row + first + lane_, simt::FromFloat<T>(number));
      }
    });
  }

  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;
  float* weights_;     // [rows][512]: scores of a split, then its weights
  float* tile_;        // [64][kTileStride]
  float* q_;           // [rows][64]
  float* factors_;     // [4][rows], as EndSoftmax writes them
  int32_t* pages_;     // [64]
  float* key_angles_;  // for SplitKeyBias
  // [64][kTileStride]: rebuilt keys or lifted values, if there are any
  float* lifted_;
  float* sums_;  // [rows][out_width]
  // The slot of a block (or the channel of a chunk) that this thread computes.
  int32_t lane_;
  int32_t first_row_;

  Item item_;
  int64_t kv_head_;
  SlotRange seen_;   // slots that at least one row of the item sees
  SlotRange slots_;  // slots of the split that at least one row sees
  int64_t split_;    // first slot of the split
  // True if sums_ and factors_ have results of earlier splits.
  bool merged_;
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
