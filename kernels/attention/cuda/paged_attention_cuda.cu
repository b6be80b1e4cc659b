// paged_attention on a GPU: three launches. `attention_divide`, one warp, looks
// at the sequences and says which items of work there are; `attention`, a grid
// that stays, takes items as they are numbered; `attention_merge` puts the
// splits of a row together.
//
// The host knows how many sequences there are and nothing of their lengths, so
// the same launches serve every step with as many. An item is the query heads
// of one HeadUnit and of as many tokens as make up to 16 rows, over all slots
// that they see or, for sequences of few rows, over one split of
// kAttentionSplitSlots. Borders of splits lie at fixed slots. Which contexts
// are split follows from the room for partial results: the longest ones, down
// to as few splits as fit.
//
// The arithmetic of a row is its own: each split by itself (scores, the maximum
// of all its slots, weights, sums over its slots in order), then merged in
// order in float32 (attention_items.h), by the CTA that has all of them or by
// attention_merge: the same operations on the same numbers. So a row's bits
// depend neither on the batch nor on chunks, splits or who computes what. They
// are not the CPU's. Which of two kernels computes items is a matter of the
// layer's codecs and the activations' type, decided once: `attention` by tensor
// cores (mma_attention-inl.h), or `attention_plain` (plain_attention.h).
//
// Bytes of a row: its latents up to its own slot, once for all rows of an item;
// partial results are 4 (out_width + 2) bytes for 512 slots of a head, written
// and read once. Floor: the latents' bytes over the memory's bandwidth.
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/mma_attention-inl.h"
#include "kernels/attention/cuda/plain_attention.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/op_table.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kMergeThreads = 128;
// Contexts of 2^1, 2^2, ... splits and more, as candidates for being split.
constexpr int kLeastSplits = 20;

// Sum of the lanes below, and in `total` of all so far.
KVASIR_DEVICE int32_t SumBefore(int32_t value, int32_t* total) {
  int32_t sum = value;
  for (uint32_t lanes = 1; lanes < simt::kWarp; lanes *= 2) {
    const int32_t below = simt::ShuffleUp(sum, lanes);
    if (simt::Lane() >= lanes) sum += below;
  }
  const int32_t before = *total + sum - value;
  *total += simt::ShuffleFrom(sum, simt::kWarp - 1);
  return before;
}

KVASIR_DEVICE SequenceItems ShapeOf(const AttentionDevice& device,
                                    const AttentionSequence& sequence) {
  SequenceItems items;
  if (sequence.num_rows == 0) return items;
  items.tiles = static_cast<int32_t>(
      Quotient(sequence.num_rows + device.tile_tokens - 1, device.tile_tokens));
  const SlotRange seen = RowsSlots(device, sequence, 0, sequence.num_rows);
  if (seen.end <= seen.begin) return items;
  items.first_split = static_cast<int32_t>(seen.begin / kAttentionSplitSlots);
  items.num_splits =
      static_cast<int32_t>((seen.end - 1) / kAttentionSplitSlots) -
      items.first_split + 1;
  return items;
}

// Partial results of a sequence that may be split, for all heads; at most one
// more than there is room for.
KVASIR_DEVICE int32_t PartialsOf(const AttentionDevice& device,
                                 const AttentionSequence& sequence,
                                 const SequenceItems& items) {
  if (sequence.num_rows > kDeviceSplitRows) return 0;
  const int64_t count = sequence.num_rows * items.num_splits;
  return static_cast<int32_t>(
      count <= device.most_partials ? count : device.most_partials + 1);
}

KVASIR_KERNEL(simt::kWarp)
DivideKernel(AttentionKernelArgs args) {
  const AttentionDevice& device = args.device;
  const auto lane = static_cast<int32_t>(simt::Lane());
  const auto warp = static_cast<int32_t>(simt::kWarp);
  float partials[kLeastSplits] = {};  // exact: whole numbers far below 2^24
  for (int32_t s = lane; s < args.num_sequences; s += warp) {
    const AttentionSequence& sequence = args.sequences[s];
    const SequenceItems items = ShapeOf(device, sequence);
    const auto count = static_cast<float>(PartialsOf(device, sequence, items));
    KVASIR_UNROLL
    for (int k = 0; k < kLeastSplits; ++k) {
      partials[k] += items.num_splits >= 2 << k ? count : 0.0f;
    }
  }
  int32_t least_splits = 2 << kLeastSplits;
  KVASIR_UNROLL
  for (int k = kLeastSplits - 1; k >= 0; --k) {
    if (simt::WarpSum(partials[k]) <=
        static_cast<float>(device.most_partials)) {
      least_splits = 2 << k;
    }
  }
  SequenceItems total;
  for (int32_t first = 0; first < args.num_sequences; first += warp) {
    const int32_t s = first + lane;
    SequenceItems items;
    int32_t partials_here = 0;
    int32_t rows = 0;
    if (s < args.num_sequences) {
      const AttentionSequence& sequence = args.sequences[s];
      items = ShapeOf(device, sequence);
      if (items.num_splits >= least_splits) {
        partials_here = PartialsOf(device, sequence, items);
        if (partials_here > 0) rows = static_cast<int32_t>(sequence.num_rows);
      }
    }
    const int32_t items_here = items.tiles *
                               static_cast<int32_t>(device.num_units) *
                               (partials_here > 0 ? items.num_splits : 1);
    items.first_item = SumBefore(items_here, &total.first_item);
    items.first_merge = SumBefore(rows, &total.first_merge);
    const int32_t before = SumBefore(partials_here, &total.first_partial);
    items.first_partial = partials_here > 0 ? before : -1;
    if (s < args.num_sequences) args.items[s] = items;
  }
  if (lane == 0) args.items[args.num_sequences] = total;
}

template <typename T>
KVASIR_KERNEL(kPlainThreads)
PlainKernel(AttentionKernelArgs args) {
  PlainAttention<T> attention(args);
  const int32_t count = args.items[args.num_sequences].first_item;
  for (auto i = static_cast<int32_t>(simt::CtaX()); i < count;
       i += static_cast<int32_t>(simt::CtasX())) {
    attention.Compute(FindItem(args, i));
  }
}

template <typename T>
KVASIR_KERNEL(kMmaThreads)
MmaKernel(AttentionKernelArgs args) {
  MmaAttention<T> attention(args);
  const int32_t count = args.items[args.num_sequences].first_item;
  for (auto i = static_cast<int32_t>(simt::CtaX()); i < count;
       i += static_cast<int32_t>(simt::CtasX())) {
    const Item item = FindItem(args, i);
    attention.Compute(item, args.device.unit_chunks[item.unit_index]);
  }
}

// A warp to a row and head.
template <typename T>
KVASIR_DEVICE void MergeRow(const AttentionKernelArgs& args, int32_t index,
                            int32_t place) {
  const AttentionDevice& device = args.device;
  const int32_t s = FindSequence<&SequenceItems::first_merge>(args, index);
  const SequenceItems items = args.items[s];
  const AttentionSequence& sequence = args.sequences[s];
  const int64_t row = index - items.first_merge;
  const float* const first =
      PartialOf(args, items.first_partial + row * items.num_splits, place);
  const int64_t stride = device.num_heads * device.partial_floats();
  const int64_t head = device.heads[place];
  const int64_t kv_head =
      Quotient(head, Quotient(device.num_heads, device.num_kv_heads));
  T* const out = static_cast<T*>(args.out) +
                 (sequence.first_row + row) * device.out_row_stride;
  int64_t sums = 0;
  for (int64_t p = 0; p < device.num_value_parts; ++p) {
    const DevicePart& part = device.values[p];
    const int64_t width =
        part.latents.groups[part.group_of_head[kv_head]].width;
    for (int64_t c = simt::Lane(); c < width; c += simt::kWarp) {
      RowTotal total;
      float sum = 0.0f;
      for (int32_t split = 0; split < items.num_splits; ++split) {
        const float* const partial = first + split * stride;
        const MergeFactors factors =
            Merge(simt::LoadGlobal(partial + device.out_width),
                  simt::LoadGlobal(partial + device.out_width + 1), &total);
        sum = MergeSum(factors, sum, simt::LoadGlobal(partial + sums + c));
      }
      const float number = total.sum != 0.0f ? sum * (1.0f / total.sum) : 0.0f;
      simt::StoreGlobal(out + part.column[head] + c,
                        simt::FromFloat<T>(number));
    }
    sums += width;
  }
}

template <typename T>
KVASIR_KERNEL(kMergeThreads)
MergeKernel(AttentionKernelArgs args) {
  const auto heads = static_cast<int32_t>(args.device.num_heads);
  const int32_t count = args.items[args.num_sequences].first_merge * heads;
  constexpr int32_t kWarps = kMergeThreads / simt::kWarp;
  for (auto i = static_cast<int32_t>(simt::CtaX()) * kWarps +
                static_cast<int32_t>(simt::Warp());
       i < count; i += static_cast<int32_t>(simt::CtasX()) * kWarps) {
    MergeRow<T>(args, i / heads, i % heads);
  }
}

template <typename T>
void LaunchItems(const AttentionKernelArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  // As many CTAs as a multiprocessor of 227 KiB has room for, about.
  if constexpr (sizeof(T) == 2) {
    if (args.device.chunks != nullptr) {
      launch.name = "attention";
      launch.grid_x = static_cast<uint32_t>(2 * launcher.multiprocessors());
      launch.threads = kMmaThreads;
      launch.shared_bytes =
          static_cast<uint32_t>(MmaAttention<T>::SharedBytes(args.device));
      return simt::Launch(launcher, launch, MmaKernel<T>, args);
    }
  }
  launch.name = "attention_plain";
  launch.grid_x = static_cast<uint32_t>(3 * launcher.multiprocessors());
  launch.threads = kPlainThreads;
  launch.shared_bytes = static_cast<uint32_t>(
      4 * PlainAttention<T>::SharedFloats(args.device.out_width));
  simt::Launch(launcher, launch, PlainKernel<T>, args);
}

}  // namespace

void PagedAttentionCuda(const AttentionLaunchArgs& launch, float* scratch,
                        Launcher& launcher) {
  if (launch.sequence_count == 0) return;
  AttentionKernelArgs args;
  args.device = *launch.device;
  args.q = launch.q;
  args.out = launch.out;
  args.sequences = launch.sequences;
  args.num_sequences = static_cast<int32_t>(launch.sequence_count);
  args.items = reinterpret_cast<SequenceItems*>(scratch);
  args.partials =
      reinterpret_cast<float*>(args.items + launch.sequence_count + 1);

  KernelLaunch divide;
  divide.name = "attention_divide";
  divide.threads = simt::kWarp;
  simt::Launch(launcher, divide, DivideKernel, args);
  VisitDType(args.device.dtype, [&](auto type) {
    using T = decltype(type);
    LaunchItems<T>(args, launcher);
    KernelLaunch merge;
    merge.name = "attention_merge";
    merge.grid_x = static_cast<uint32_t>(4 * launcher.multiprocessors());
    merge.threads = kMergeThreads;
    simt::Launch(launcher, merge, MergeKernel<T>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
