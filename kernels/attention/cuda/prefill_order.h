// The order in which prefill_attention-inl.h visits the slots that an item
// reads. C++17, device code.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Returns the most tokens of an item of the kernel for prompts.
KVASIR_DEVICE int32_t PromptTokens(const AttentionKernelArgs& args) {
  return args.prompt_rows / args.device.most_heads;
}
// Like FindItem (attention_items.h), but for items of the kernel for prompts.
// These items cover all slots and have no partial results.
KVASIR_DEVICE Item FindPromptItem(const AttentionKernelArgs& args,
                                  int32_t index) {
  const int32_t s = FindSequence<&SequenceItems::first_prompt>(args, index);
  const auto units = static_cast<int32_t>(args.device.num_units);
  const int32_t rest = index - args.items[s].first_prompt;
  const int32_t tokens = PromptTokens(args);
  Item item = {};
  item.sequence = args.sequences + s;
  item.unit_index = rest % units;
  item.unit = args.device.units[item.unit_index];
  item.first_token = int64_t{rest / units} * tokens;
  const int64_t left = item.sequence->num_rows - item.first_token;
  item.num_tokens = left < tokens ? static_cast<int32_t>(left) : tokens;
  return item;
}

// The most channels of exact rows that are loaded at a time. A chunk that has
// more is loaded in several parts.
inline constexpr int32_t kPromptPartChannels = 64;
KVASIR_DEVICE int32_t PartsOf(const LatentChunkOnDevice& chunk) {
  return (chunk.channels + kPromptPartChannels - 1) / kPromptPartChannels;
}

// Slots [begin, end) of a context. Slot numbers are below kAttentionMostSlots,
// so 32 bits suffice.
struct Slots {
  int32_t begin;
  int32_t end;
};

// The forms in which a set of tokens reads keys (or values). At least one token
// reads the slots before `sinks` and from `exact_from` on as exact rows. At
// least one token reads the slots [sinks, codec_end) as latents. The two sets
// of slots may overlap.
struct SideReads {
  int32_t sinks;
  int32_t exact_from;
  int32_t codec_end;

  KVASIR_DEVICE bool Has(bool as_exact, const Slots& slots) const {
    if (as_exact) return slots.begin < sinks || slots.end > exact_from;
    return (slots.begin > sinks ? slots.begin : sinks) <
           (slots.end < codec_end ? slots.end : codec_end);
  }
};
// Returns how the tokens in slots `own` read keys (or values) that have the
// exact slots `exact`.
KVASIR_DEVICE SideReads ReadsOf(const ExactSlots& exact, const Slots& own) {
  const auto window = static_cast<int32_t>(exact.window);
  SideReads reads = {static_cast<int32_t>(exact.sinks), 0x7fffffff, 0x7fffffff};
  if (window > 0) {
    reads.exact_from = own.begin - window + 1;
    reads.codec_end = own.end - window;
  }
  return reads;
}

// A visit is one pass over a block of 64 slots. It reads all keys in one form,
// latents or exact rows, and all values in one form. If rows read a block in
// several forms, there are several visits of the block, one for each pair of
// forms. `bits` packs the block and the two forms into one register.
struct Visit {
  int32_t bits;

  KVASIR_DEVICE int32_t block() const { return bits / 4; }
  KVASIR_DEVICE bool keys_exact() const { return bits & 1; }
  KVASIR_DEVICE bool values_exact() const { return bits & 2; }
};
// The order of an item's visits, block by block. In a visit, all chunks of keys
// are read and then all chunks of values. Chunks of exact rows are read in
// parts (kPromptPartChannels).
struct PromptOrder {
  Slots seen;  // slots that at least one row sees; may be empty
  Slots own;   // slots of the item's own tokens

  KVASIR_DEVICE bool Done(const Visit& at) const {
    return at.block() >= EndBlock();
  }
  KVASIR_DEVICE int32_t EndBlock() const {
    constexpr auto kBlock = static_cast<uint32_t>(kAttentionBlockSlots);
    return static_cast<int32_t>((static_cast<uint32_t>(seen.end) + kBlock - 1) /
                                kBlock);
  }
  KVASIR_DEVICE Visit First(const AttentionDevice& device) const {
    constexpr auto kBlock = static_cast<int32_t>(kAttentionBlockSlots);
    if (seen.end <= seen.begin) return {4 * EndBlock()};
    const Visit first = {seen.begin / kBlock * 4};
    return Has(device, first) ? first : Next(device, first);
  }
  KVASIR_DEVICE Visit Next(const AttentionDevice& device, Visit at) const {
    if (!device.has_exact) return {at.bits + 4};
    do {
      ++at.bits;
    } while (!Done(at) && !Has(device, at));
    return at;
  }

 private:
  KVASIR_DEVICE bool Has(const AttentionDevice& device, const Visit& at) const {
    if (!device.has_exact) return true;
    const ExactSlots& keys = device.key_exact;
    const ExactSlots& values = device.value_exact;
    if (at.keys_exact() != at.values_exact() && keys.sinks == values.sinks &&
        keys.window == values.window) {
      return false;
    }
    constexpr auto kBlock = static_cast<int32_t>(kAttentionBlockSlots);
    const int32_t begin = at.block() * kBlock;
    const Slots slots = {begin > seen.begin ? begin : seen.begin,
                         seen.end - begin < kBlock ? seen.end : begin + kBlock};
    return ReadsOf(keys, own).Has(at.keys_exact(), slots) &&
           ReadsOf(values, own).Has(at.values_exact(), slots);
  }
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
