// paged_attention on a GPU has three launches, and two more if the layer has
// attention mass (attention_mass-inl.h). `attention_divide`, a single
// warp, reads the lengths of the sequences and makes the list of work items.
// `attention`, a persistent grid, computes the items in the order of their
// numbers. `attention_merge` merges the splits of each row. Sequences of more
// than kDeviceSplitRows rows are prompts. A fourth launch, `attention_prefill`,
// computes them if it supports the layer (prefill_attention-inl.h) and if their
// bits may differ from those of single rows.
//
// The launches depend only on the number of sequences, not on their lengths, so
// every step with the same number of sequences can repeat them. An item has the
// query heads of one HeadUnit for some tokens, at most 8 rows (16 if a unit has
// more than 8 heads). It covers all slots that these rows see or, if the
// context of a sequence of few rows is split, 1 to 8 splits of
// kAttentionSplitSlots slots. The number of splits is chosen so that there are
// about eight items for each CTA. Splits begin at fixed slots.
//
// The memory for partial results may not suffice for all contexts, so the
// longest contexts are split first. Let group k be all contexts of at least
// 2^(k + 1) splits. The largest group whose partial results all fit is split
// completely. Then the remaining contexts of the next larger group are split in
// order until the memory is used up.
//
// A row's arithmetic does not depend on other rows. Each split is computed
// separately: scores, the maximum over all its slots, weights, then sums over
// its slots in order. The splits are merged in order in float32
// (attention_items.h), with the same operations on the same numbers whether one
// CTA computes all splits of a row or attention_merge merges them. So a row's
// bits do not depend on the batch, on chunks, on splits or on which CTA
// computes it. The kernel attention_prefill computes rows in another order. Its
// bits do not depend on how a prompt is cut into chunks either, if it computes
// every chunk of the prompt. All these bits differ from those of a CPU.
//
// An infinite or NaN number in a latent affects only rows that see its slot. A
// score of NaN makes its row NaN. So does +inf, unless there is a cap. A score
// of -inf has weight 0, but if all scores of a row are -inf, the row is NaN.
//
// The kernel that computes items is chosen once for a layer, by its codecs and
// by the types of activations and exact rows: `attention` on tensor cores
// (mma_attention-inl.h), or `attention_plain` (plain_attention-inl.h), which
// also computes all layers with rebuilt keys or lifted values.
//
// Memory traffic: an item reads the latents of the slots that its rows see once
// for all rows. A partial result has 4 (out_width + 2) bytes per 512 slots and
// head. It is written once and read once, except that its last two numbers are
// read once per 32 channels. The lower bound of the time is the bytes of the
// latents divided by the memory bandwidth.
#include "kernels/attention/cuda/attention_items.h"
#include "kernels/attention/cuda/attention_mass.h"
#include "kernels/attention/cuda/mma_attention-inl.h"
#include "kernels/attention/cuda/plain_attention-inl.h"
#include "kernels/attention/cuda/prefill_attention.h"
#include "kernels/attention/cuda/prefill_order.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kMergeThreads = 128;
// The number of groups of contexts that DivideKernel considers: contexts of at
// least 2, of at least 4, of at least 8, ... splits.
constexpr int kLeastSplits = 20;
// The most splits of an item. An item stages its queries once for all splits.
constexpr int32_t kMostItemSplits = 8;

// Returns the old *total plus the values of all lanes with a smaller index.
// Then adds the values of all lanes to *total.
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

// Returns how many items a sequence has in the kernel for prompts, or 0 if
// another kernel computes the sequence.
KVASIR_DEVICE int32_t PromptItems(const AttentionKernelArgs& args,
                                  const AttentionSequence& sequence) {
  if (args.prompt_rows == 0 || sequence.num_rows <= kDeviceSplitRows) return 0;
  const auto tokens = static_cast<uint32_t>(PromptTokens(args));
  return static_cast<int32_t>(
      (static_cast<uint32_t>(sequence.num_rows) + tokens - 1) / tokens *
      static_cast<uint32_t>(args.device.num_units));
}

// Returns how many partial results (each for all heads) a sequence needs if its
// context is split, or 0 for a prompt. A number above most_partials does not
// fit, and is returned as most_partials + 1.
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
  // float32 represents whole numbers up to 2^24 exactly, and most_partials is
  // less than that.
  static_assert(kDevicePartialBytes / (4 * 3) < 1 << 24);
  float partials[kLeastSplits] = {};
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
  float granted = 0.0f;
  KVASIR_UNROLL
  for (int k = kLeastSplits - 1; k >= 0; --k) {
    const float sum = simt::WarpSum(partials[k]);
    if (sum <= static_cast<float>(device.most_partials)) {
      least_splits = 2 << k;
      granted = sum;
    }
  }
  const auto room = static_cast<int32_t>(device.most_partials) -
                    static_cast<int32_t>(granted);
  const auto units = static_cast<int32_t>(device.num_units);
  const int32_t many = static_cast<int32_t>(granted) * units / (8 * args.ctas);
  const int32_t item_splits = many < 1                 ? 1
                              : many < kMostItemSplits ? many
                                                       : kMostItemSplits;
  // The number of partial results requested so far by contexts with fewer than
  // least_splits splits. These contexts are split only while memory is left.
  int32_t asked = 0;
  SequenceItems total;
  for (int32_t first = 0; first < args.num_sequences; first += warp) {
    const int32_t s = first + lane;
    SequenceItems items;
    int32_t partials_here = 0;
    if (s < args.num_sequences) {
      items = ShapeOf(device, args.sequences[s]);
      if (items.num_splits >= 2 && items.num_splits >= least_splits / 2) {
        partials_here = PartialsOf(device, args.sequences[s], items);
      }
    }
    const bool next_power = items.num_splits < least_splits;
    const int32_t asks = next_power ? partials_here : 0;
    const int32_t asked_before = SumBefore(asks, &asked);
    if (next_power && asked_before + asks > room) partials_here = 0;
    const int32_t rows = partials_here > 0
                             ? static_cast<int32_t>(args.sequences[s].num_rows)
                             : 0;
    items.item_splits = item_splits;
    const int32_t items_here =
        items.tiles * units *
        (partials_here > 0 ? (items.num_splits + item_splits - 1) / item_splits
                           : 1);
    const int32_t prompts =
        s < args.num_sequences ? PromptItems(args, args.sequences[s]) : 0;
    items.first_prompt = SumBefore(prompts, &total.first_prompt);
    items.first_item =
        SumBefore(prompts > 0 ? 0 : items_here, &total.first_item);
    items.first_merge = SumBefore(rows, &total.first_merge);
    const int32_t before = SumBefore(partials_here, &total.first_partial);
    items.first_partial = partials_here > 0 ? before : -1;
    if (s < args.num_sequences) args.items[s] = items;
  }
  total.next_item = static_cast<uint32_t>(args.ctas);
  total.next_prompt = static_cast<uint32_t>(args.prompt_ctas);
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

// The number of CTAs of `attention` that should fit on a multiprocessor. nvcc
// limits the registers of a thread accordingly. (On sm_80, the shared memory of
// a multiprocessor has room for only three CTAs.)
constexpr int MmaCtas(int32_t tiles, MmaKind kind, bool exact) {
  if (tiles > 1) return 2;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return kind == MmaKind::kAny || exact ? 2 : 3;
#else
  if (kind == MmaKind::kAny || kind == MmaKind::kLevels3) return exact ? 2 : 3;
  return kind == MmaKind::kNumbers || exact ? 3 : 4;
#endif
}

template <typename T, int32_t tiles, MmaKind kind, bool exact>
KVASIR_KERNEL_OF(kMmaThreads, MmaCtas(tiles, kind, exact))
MmaKernel(AttentionKernelArgs args) {
  MmaAttention<T, tiles, kind, exact> attention(args);
  SequenceItems* const total = args.items + args.num_sequences;
  const auto count = static_cast<uint32_t>(total->first_item);
  // Items differ in length and multiprocessors in speed, so CTAs take items one
  // by one from a shared counter.
  uint32_t i = simt::CtaX();
  while (i < count) {
    const Item item = FindItem(args, static_cast<int32_t>(i));
    if (simt::Thread() == 0) {
      simt::StoreShared(attention.next_item(),
                        simt::AtomicAdd(&total->next_item, 1u));
    }
    attention.Compute(item, args.device.unit_chunks[item.unit_index]);
    // Compute has barriers, so the index that one thread stored is now visible
    // to all threads.
    i = simt::LoadShared(attention.next_item());
    simt::SyncCta();
  }
}

// The two factors by which a split is merged (MergeFactors), and the split's
// sum of weights.
struct alignas(16) SplitFactors {
  float total;
  float split;
  float sum;
  float unused;
};

// Computes the factors of 32 splits, one per lane. `is_one` is false for a lane
// without a split, whose factors change no sum. `*max` is the maximum over all
// earlier splits, and is updated. The factors have the same bits as if Merge
// were called split by split.
KVASIR_DEVICE SplitFactors FactorsOf(const float* partial, bool is_one,
                                     int64_t out_width, float* max) {
  float own = kNoSlot;
  SplitFactors factors = {1.0f, 0.0f, 0.0f, 0.0f};
  if (is_one) {
    own = simt::LoadGlobal(partial + out_width);
    factors.sum = simt::LoadGlobal(partial + out_width + 1);
  }
  float most = own;  // maximum over the lanes up to this one
  for (uint32_t lanes = 1; lanes < simt::kWarp; lanes *= 2) {
    const float below = simt::ShuffleUp(most, lanes);
    if (simt::Lane() >= lanes && below > most) most = below;
  }
  if (*max > most) most = *max;
  const float before = simt::ShuffleUp(most, 1);
  if (is_one) {
    factors.total = simt::Exp2((simt::Lane() > 0 ? before : *max) - most);
    factors.split = simt::Exp2(own - most);
  }
  *max = simt::ShuffleFrom(most, simt::kWarp - 1);
  return factors;
}

// Returns the address in `out` of a head's output channel `channel`, counted
// over all value parts. Returns null if the head has fewer channels.
template <typename T>
KVASIR_DEVICE T* ResultAt(const AttentionKernelArgs& args, int64_t row,
                          int64_t head, int64_t channel) {
  const AttentionDevice& device = args.device;
  const int64_t kv_head =
      Quotient(head, Quotient(device.num_heads, device.num_kv_heads));
  for (int64_t p = 0; p < device.num_value_parts; ++p) {
    const DevicePart& part = device.values[p];
    const int64_t width =
        part.lift.dims > 0
            ? part.lift.dims
            : part.latents.groups[part.group_of_head[kv_head]].width;
    if (channel < width) {
      return static_cast<T*>(args.out) + row * device.out_row_stride +
             part.column[head] + channel;
    }
    channel -= width;
  }
  return nullptr;
}

// Merges 32 channels of one token and head, one channel per lane. For 32 splits
// at a time, each lane computes the factors of one split, and then all lanes
// read all factors from shared memory. The sums of 16 splits are loaded at a
// time and then added in order.
template <typename T>
KVASIR_DEVICE void MergeRow(const AttentionKernelArgs& args, int32_t index,
                            int32_t place, int32_t first_channel) {
  constexpr int32_t kAhead = 16;
  constexpr auto kLanes = static_cast<int32_t>(simt::kWarp);
  const AttentionDevice& device = args.device;
  const int32_t s = FindSequence<&SequenceItems::first_merge>(args, index);
  const SequenceItems items = args.items[s];
  const int64_t row = index - items.first_merge;
  const auto stride =
      static_cast<int32_t>(device.num_heads * device.partial_floats());
  const auto lane = static_cast<int32_t>(simt::Lane());
  const float* const first =
      PartialOf(args, items.first_partial + row * items.num_splits, place);
  const int32_t channel = first_channel + lane;
  T* const to = ResultAt<T>(args, args.sequences[s].first_row + row,
                            device.heads[place], channel);
  auto* const factors = reinterpret_cast<SplitFactors*>(simt::Shared()) +
                        simt::Warp() * simt::kWarp;
  float max = kNoSlot;
  float weights = 0.0f;
  float sum = 0.0f;
  for (int32_t split = 0; split < items.num_splits; split += kLanes) {
    const float* const here = first + int64_t{split} * stride;
    const int32_t count = items.num_splits - split;
    const SplitFactors of_lane =
        FactorsOf(here + lane * stride, lane < count, device.out_width, &max);
    simt::SyncWarp();  // all lanes are done with the previous factors
    simt::StoreShared(factors + lane, of_lane);
    simt::SyncWarp();
    KVASIR_NO_UNROLL
    for (int32_t k = 0; k < kLanes && k < count; k += kAhead) {
      float sums[kAhead];
      KVASIR_UNROLL
      for (int32_t i = 0; i < kAhead; ++i) {
        sums[i] = k + i < count && channel < device.out_width
                      ? simt::LoadGlobal(here + (k + i) * stride + channel)
                      : 0.0f;
      }
      KVASIR_UNROLL
      for (int32_t i = 0; i < kAhead; ++i) {
        if (k + i >= count) continue;
        const SplitFactors at = simt::LoadShared(factors + k + i);
        const MergeFactors merge = {at.total, at.split};
        sum = MergeSum(merge, sum, sums[i]);
        weights = MergeSum(merge, weights, at.sum);
      }
    }
  }
  if (to == nullptr) return;
  const float number = SeesSlots(max) ? sum * (1.0f / weights) : 0.0f;
  simt::StoreGlobal(to, simt::FromFloat<T>(number));
}

constexpr int32_t kMergeWarps = kMergeThreads / simt::kWarp;

template <typename T>
KVASIR_KERNEL(kMergeThreads)
MergeKernel(AttentionKernelArgs args) {
  const auto heads = static_cast<int32_t>(args.device.num_heads);
  const int32_t count = args.items[args.num_sequences].first_merge * heads;
  const auto ctas = static_cast<int32_t>(simt::CtasX());
  // Neighbouring rows are merged by different CTAs, so that even a few rows use
  // all multiprocessors.
  for (auto i = static_cast<int32_t>(simt::CtaX()) +
                static_cast<int32_t>(simt::Warp()) * ctas;
       i < count; i += kMergeWarps * ctas) {
    MergeRow<T>(args, i / heads, i % heads,
                static_cast<int32_t>(simt::CtaY() * simt::kWarp));
  }
}

// Returns the launch of `attention` or of `attention_plain`, whichever computes
// the layer's items.
KernelLaunch ItemLaunch(const AttentionDevice& device,
                        const Launcher& launcher) {
  KernelLaunch launch;
  if (device.chunks != nullptr) {
    launch.name = "attention";
    launch.threads = kMmaThreads;
    launch.shared_bytes = static_cast<uint32_t>(MmaSharedBytes(device));
    launch.grid_x = StayingCtas(
        device, launch.shared_bytes,
        MmaCtas(device.tile_rows > 8 ? 2 : 1, device.kind, device.has_exact),
        launcher);
  } else {
    launch.name = "attention_plain";
    launch.threads = kPlainThreads;
    launch.shared_bytes = static_cast<uint32_t>(PlainSharedBytes(device));
    launch.grid_x = StayingCtas(device, launch.shared_bytes, 3, launcher);
  }
  return launch;
}

// Calls run(kernel) with the kernel instance for the layer's kind of chunks.
template <typename T, typename Run>
void RunMma(const AttentionDevice& device, const Run& run) {
  if (device.tile_rows > 8) return run(MmaKernel<T, 2, MmaKind::kAny, false>);
  switch (device.kind) {
    case MmaKind::kAny:
      return run(MmaKernel<T, 1, MmaKind::kAny, false>);
    case MmaKind::kNumbers:
      return run(MmaKernel<T, 1, MmaKind::kNumbers, false>);
    case MmaKind::kCodes8:
      return run(MmaKernel<T, 1, MmaKind::kCodes8, false>);
    case MmaKind::kCodes4:
      return run(MmaKernel<T, 1, MmaKind::kCodes4, false>);
    case MmaKind::kLevels4:
      return run(MmaKernel<T, 1, MmaKind::kLevels4, false>);
    case MmaKind::kLevels3:
      return run(MmaKernel<T, 1, MmaKind::kLevels3, false>);
  }
}
// Like RunMma, for layers with exact rows. These have kernel instances only for
// the kinds of chunks that AddChunks sets for them.
template <typename T, typename Run>
void RunExact(const AttentionDevice& device, const Run& run) {
  if (device.tile_rows > 8) return run(MmaKernel<T, 2, MmaKind::kAny, true>);
  if constexpr (DTypeOf<T>::kValue == DType::kBf16) {
    if (device.kind == MmaKind::kCodes8) {
      return run(MmaKernel<T, 1, MmaKind::kCodes8, true>);
    }
    if (device.kind == MmaKind::kCodes4) {
      return run(MmaKernel<T, 1, MmaKind::kCodes4, true>);
    }
    if (device.kind == MmaKind::kLevels4) {
      return run(MmaKernel<T, 1, MmaKind::kLevels4, true>);
    }
    if (device.kind == MmaKind::kLevels3) {
      return run(MmaKernel<T, 1, MmaKind::kLevels3, true>);
    }
  }
  run(MmaKernel<T, 1, MmaKind::kAny, true>);
}

template <typename T>
void LaunchItems(const AttentionKernelArgs& args, const KernelLaunch& launch,
                 Launcher& launcher) {
  if constexpr (sizeof(T) == 2) {
    const AttentionDevice& device = args.device;
    const auto run = [&](auto kernel) {
      simt::Launch(launcher, launch, kernel, args);
    };
    if (device.chunks != nullptr) {
      return device.has_exact ? RunExact<T>(device, run)
                              : RunMma<T>(device, run);
    }
  }
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
  args.mass_totals = args.partials + args.device.most_partials *
                                         args.device.num_heads *
                                         args.device.partial_floats();

  KernelLaunch prompts;
  // The kernel for prompts reads queries in pieces of 16 bytes.
  if (launch.has_prompts && args.device.prompt_rows > 0 &&
      reinterpret_cast<uintptr_t>(args.q) % 16 == 0) {
    prompts = PromptLaunch(args.device, launcher);
    args.prompt_rows = args.device.prompt_rows;
    args.prompt_ctas = static_cast<int32_t>(prompts.grid_x);
  }
  const KernelLaunch items = ItemLaunch(args.device, launcher);
  args.ctas = static_cast<int32_t>(items.grid_x);

  KernelLaunch divide;
  divide.name = "attention_divide";
  divide.threads = simt::kWarp;
  simt::Launch(launcher, divide, DivideKernel, args);
  if (args.prompt_rows > 0) LaunchPrompts(args, prompts, launcher);
  VisitDType(args.device.dtype, [&](auto type) {
    using T = decltype(type);
    LaunchItems<T>(args, items, launcher);
    KernelLaunch merge;
    merge.name = "attention_merge";
    merge.grid_y = simt::Ctas(args.device.out_width, simt::kWarp);
    merge.grid_x =
        simt::Ctas(int64_t{4} * launcher.multiprocessors(), merge.grid_y);
    merge.threads = kMergeThreads;
    merge.shared_bytes = kMergeThreads * sizeof(SplitFactors);
    simt::Launch(launcher, merge, MergeKernel<T>, args);
  });
  if (args.device.most_mass_rows > 0) LaunchMass(args, launcher);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
