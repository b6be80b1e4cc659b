// Adds attention mass (paged_attention.h) on a GPU, for any codec. C++17,
// device code.
//
// Two kernels run after attention. Both compute scores as PlainAttention does,
// so keys are read two more times:
//   attention_mass_totals: an item has the query heads of one HeadUnit for some
//     tokens that add mass. It finds the maximum and the sum of each row's
//     softmax over all splits.
//   attention_mass: an item has one split of a sequence and one unit of
//     eviction. It computes the weights of the split again, for all rows that
//     add mass, and adds them to the slots.
// For a slot's mass S and each row that sees the slot, in ascending order:
//   S = S + (FMA chain, from 0, over the unit's heads, in the order of
//            mass_heads: weight * (Exp2(split_max - max) * (1 / sum)))
// Here weight = Exp2(score - split_max), and split_max is the row's greatest
// score of the split. A slot has one owner and rows are added one by one, so
// the bits depend neither on the batch nor on chunks, CTAs or their order. They
// differ from those of a CPU.
//
// Cost: the multiply-adds of two plain passes over keys, on no tensor cores.
// The first kernel computes all splits of a row in one CTA. Both would be
// cheaper if the attention kernels kept their weights, maxima and sums.
#pragma once

#include "kernels/attention/cuda/plain_attention-inl.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

KVASIR_DEVICE int64_t CountedRows(const AttentionSequence& sequence) {
  return sequence.num_rows - sequence.first_counted_row;
}

// Calls run(sequence, index) for each item that this CTA computes. A sequence
// that adds mass has count_of(sequence) items, and `index` is the item's index
// among them.
template <typename CountOf, typename Run>
KVASIR_DEVICE void ForMassItems(const AttentionKernelArgs& args,
                                const CountOf& count_of, const Run& run) {
  int32_t first = 0;
  auto item = static_cast<int32_t>(simt::CtaX());
  for (int32_t s = 0; s < args.num_sequences; ++s) {
    const AttentionSequence& sequence = args.sequences[s];
    if (CountedRows(sequence) <= 0) continue;
    const int32_t count = count_of(sequence);
    for (; item - first < count; item += static_cast<int32_t>(simt::CtasX())) {
      run(sequence, item - first);
    }
    first += count;
  }
}

template <typename T>
class MassAttention {
 public:
  KVASIR_DEVICE explicit MassAttention(const AttentionKernelArgs& args)
      : args_(args),
        device_(args.device),
        attention_(args),
        mass_(attention_.memory_for_sums()),
        factors_(mass_ + kSplit * device_.mass_tokens) {}

  // Computes this CTA's items of attention_mass_totals.
  KVASIR_DEVICE void FindTotals() {
    const auto units = static_cast<int32_t>(device_.num_units);
    ForMassItems(
        args_,
        [&](const AttentionSequence& sequence) {
          return static_cast<int32_t>(
                     Quotient(CountedRows(sequence) + device_.mass_tokens - 1,
                              device_.mass_tokens)) *
                 units;
        },
        [&](const AttentionSequence& sequence, int32_t index) {
          FindTotalsOf(TileOf(
              sequence, index % units,
              sequence.first_counted_row +
                  int64_t{index / units} * int64_t{device_.mass_tokens}));
        });
  }
  // Computes this CTA's items of attention_mass.
  KVASIR_DEVICE void AddMass() {
    ForMassItems(
        args_,
        [&](const AttentionSequence& sequence) {
          const SlotRange slots = CountedSlots(sequence);
          return slots.end <= slots.begin
                     ? 0
                     : (LastSplit(slots) - FirstSplit(slots) + 1) *
                           device_.num_mass_units;
        },
        [&](const AttentionSequence& sequence, int32_t index) {
          const int32_t split = FirstSplit(CountedSlots(sequence)) +
                                index / device_.num_mass_units;
          AddMassOf(sequence,
                    device_.mass_units[index % device_.num_mass_units], split);
        });
  }

 private:
  static constexpr auto kThreads = static_cast<int32_t>(kPlainThreads);
  static constexpr auto kSplit = static_cast<int32_t>(kAttentionSplitSlots);
  static constexpr int32_t kOwn = kSplit / kThreads;

  KVASIR_DEVICE SlotRange
  CountedSlots(const AttentionSequence& sequence) const {
    return RowsSlots(device_, sequence, sequence.first_counted_row,
                     CountedRows(sequence));
  }
  static KVASIR_DEVICE int32_t FirstSplit(const SlotRange& slots) {
    return static_cast<int32_t>(slots.begin / kAttentionSplitSlots);
  }
  static KVASIR_DEVICE int32_t LastSplit(const SlotRange& slots) {
    return static_cast<int32_t>((slots.end - 1) / kAttentionSplitSlots);
  }
  // Returns the item with at most mass_tokens tokens from `first_token` on.
  KVASIR_DEVICE Item TileOf(const AttentionSequence& sequence,
                            int32_t unit_index, int64_t first_token) const {
    Item item = {};
    item.sequence = &sequence;
    item.unit = device_.units[unit_index];
    item.unit_index = unit_index;
    item.first_token = first_token;
    const int64_t left = sequence.num_rows - first_token;
    item.num_tokens = static_cast<int32_t>(
        left < device_.mass_tokens ? left : device_.mass_tokens);
    item.partial = -1;
    return item;
  }
  KVASIR_DEVICE float* TotalsOf(const Item& item, int32_t row) const {
    return args_.mass_totals +
           2 * ((item.sequence->first_row + item.TokenOf(row)) *
                    device_.num_heads +
                device_.heads[item.PlaceOf(row)]);
  }

  KVASIR_DEVICE void FindTotalsOf(const Item& item) {
    attention_.Begin(item);
    const SlotRange slots =
        RowsSlots(device_, *item.sequence, item.first_token, item.num_tokens);
    if (slots.end <= slots.begin) return;
    for (int32_t split = FirstSplit(slots); split <= LastSplit(slots);
         ++split) {
      if (!attention_.Enter(split)) continue;
      attention_.WeighSplit();
      attention_.Continue();
    }
    simt::SyncCta();
    const auto row = static_cast<int32_t>(simt::Thread());
    if (row >= item.rows()) return;
    const RowTotal total = attention_.TotalOf(row);
    float* const to = TotalsOf(item, row);
    simt::StoreGlobal(to, total.max);
    simt::StoreGlobal(to + 1, 1.0f / total.sum);
  }

  KVASIR_DEVICE void AddMassOf(const AttentionSequence& sequence,
                               const MassUnitOnDevice& unit, int32_t split) {
    const auto thread = static_cast<int32_t>(simt::Thread());
    const SlotRange slots = Both(SplitSlots(split), CountedSlots(sequence));
    // Each thread owns kOwn slots of the split.
    float* scores[kOwn];
    float masses[kOwn];
    KVASIR_UNROLL
    for (int32_t k = 0; k < kOwn; ++k) {
      const int64_t slot = int64_t{split} * kSplit + k * kThreads + thread;
      scores[k] = nullptr;
      masses[k] = 0.0f;
      if (slot < slots.begin || slot >= slots.end) continue;
      const auto* const table =
          simt::BitsAs<const int32_t*>(sequence.block_table);
      const int32_t page =
          simt::LoadGlobal(table + Quotient(slot, device_.page_tokens));
      scores[k] = ScoresOf(device_.metadata, page, unit.unit) +
                  Remainder(slot, device_.page_tokens);
      masses[k] = simt::LoadGlobal(scores[k]);
    }
    for (int64_t token = sequence.first_counted_row; token < sequence.num_rows;
         token += device_.mass_tokens) {
      AddTile(sequence, unit, split, token, masses);
    }
    KVASIR_UNROLL
    for (int32_t k = 0; k < kOwn; ++k) {
      if (scores[k] != nullptr) simt::StoreGlobal(scores[k], masses[k]);
    }
  }
  // Adds the mass of the tokens of one tile to this thread's slots.
  KVASIR_DEVICE void AddTile(const AttentionSequence& sequence,
                             const MassUnitOnDevice& unit, int32_t split,
                             int64_t token, float (&masses)[kOwn]) {
    Item item = {};
    for (int32_t h = 0; h < unit.count; ++h) {
      item = TileOf(sequence, device_.mass_heads[unit.first + h], token);
      attention_.Begin(item);
      if (!attention_.Enter(split)) return;  // the same for all heads
      attention_.WeighSplit();
      simt::SyncCta();
      FindFactors(item);
      simt::SyncCta();
      ForOwn(item, split, [&](int32_t /*k*/, int32_t t, int32_t i) {
        float sum = h > 0 ? simt::LoadShared(mass_ + t * kSplit + i) : 0.0f;
        for (int32_t r = 0; r < item.unit.num_heads; ++r) {
          const int32_t row = t * item.unit.num_heads + r;
          sum = simt::Fma(attention_.WeightOf(row, i),
                          simt::LoadShared(factors_ + row), sum);
        }
        simt::StoreShared(mass_ + t * kSplit + i, sum);
      });
    }
    ForOwn(item, split, [&](int32_t k, int32_t t, int32_t i) {
      masses[k] += simt::LoadShared(mass_ + t * kSplit + i);
    });
  }
  // Computes the factors that turn a split's weights into softmax weights.
  KVASIR_DEVICE void FindFactors(const Item& item) const {
    const auto row = static_cast<int32_t>(simt::Thread());
    if (row >= item.rows()) return;
    const float* const totals = TotalsOf(item, row);
    const float split_max = attention_.TotalOf(row).max;
    simt::StoreShared(factors_ + row,
                      simt::Exp2(split_max - simt::LoadGlobal(totals)) *
                          simt::LoadGlobal(totals + 1));
  }
  // Calls visit(k, t, i) for this thread's k-th slot, which is slot `i` of the
  // split, and each token `t` of the item that sees it, in ascending order.
  template <typename Visit>
  KVASIR_DEVICE void ForOwn(const Item& item, int32_t split,
                            const Visit& visit) const {
    for (int32_t t = 0; t < item.num_tokens; ++t) {
      const SlotRange visible =
          RowSlots(device_, *item.sequence, item.first_token + t);
      KVASIR_UNROLL
      for (int32_t k = 0; k < kOwn; ++k) {
        const int32_t i = k * kThreads + static_cast<int32_t>(simt::Thread());
        const int64_t slot = int64_t{split} * kSplit + i;
        if (slot >= visible.begin && slot < visible.end) visit(k, t, i);
      }
    }
  }

  const AttentionKernelArgs& args_;
  const AttentionDevice& device_;
  PlainAttention<T> attention_;
  // [mass_tokens][512]: the sum of a token's weights over the heads so far. A
  // thread uses only the columns of its own slots.
  float* const mass_;
  float* const factors_;  // [kDeviceTileRows]
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
