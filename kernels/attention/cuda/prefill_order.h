// The order in which prefill_attention-inl.h loads and computes what it has of
// a split. C++17, device code.
#pragma once

#include "kernels/attention/cuda/attention_exact.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Tokens of an item of prompts.
KVASIR_DEVICE int32_t PromptTokens(const AttentionKernelArgs& args) {
  return args.prompt_rows / args.device.most_heads;
}
// As FindItem, of those.
KVASIR_DEVICE Item FindPromptItem(const AttentionKernelArgs& args,
                                  int32_t index) {
  const int32_t s = FindSequence<&SequenceItems::first_prompt>(args, index);
  const SequenceItems items = args.items[s];
  const auto units = static_cast<int32_t>(args.device.num_units);
  const int32_t rest = index - items.first_prompt;
  const int32_t tokens = PromptTokens(args);
  Item item;
  item.sequence = args.sequences + s;
  item.first_split = items.first_split;
  item.num_splits = items.num_splits;
  item.partial = -1;
  item.partial_stride = 0;
  item.unit_index = rest % units;
  item.unit = args.device.units[item.unit_index];
  item.first_token = int64_t{rest / units} * tokens;
  const int64_t left = item.sequence->num_rows - item.first_token;
  item.num_tokens = left < tokens ? static_cast<int32_t>(left) : tokens;
  return item;
}

// Channels of a chunk's exact rows that are loaded at a time.
inline constexpr int32_t kPromptPartChannels = 64;

// For each block the chunks of keys and then, where it has some, their exact
// rows; then for each chunk of values its blocks, and exact rows behind them.
struct PromptOrder {
  struct Cursor {
    int32_t chunk;  // of the unit
    int32_t block;
    int32_t part;  // of exact rows' channels; below 0: latents
  };

  const LatentChunkOnDevice* chunks;
  int32_t num_keys, num_values;
  SideBlocks keys, values;

  KVASIR_DEVICE const LatentChunkOnDevice& ChunkOf(const Cursor& at) const {
    return chunks[at.chunk];
  }
  KVASIR_DEVICE bool OfKeys(const Cursor& at) const {
    return at.chunk < num_keys;
  }
  KVASIR_DEVICE bool Done(const Cursor& at) const {
    return at.chunk >= num_keys + num_values;
  }
  KVASIR_DEVICE bool HasExact(bool of_keys, int32_t block) const {
    return of_keys ? keys.HasExact(block) : values.HasExact(block);
  }
  KVASIR_DEVICE bool IsLastPart(const Cursor& at) const {
    return (at.part + 1) * kPromptPartChannels >= ChunkOf(at).channels;
  }

  KVASIR_DEVICE Cursor BlockOfKeys(int32_t block) const {
    return {0, block, keys.HasCodec(block) ? -1 : 0};
  }
  KVASIR_DEVICE Cursor ChunkOfValues(int32_t chunk) const {
    return values.any_codec() ? Cursor{chunk, values.codec_begin(), -1}
                              : PartOfValues(chunk, 0);
  }
  KVASIR_DEVICE Cursor PartOfValues(int32_t chunk, int32_t part) const {
    return {chunk, values.ExactFrom(values.first()), part};
  }

  KVASIR_DEVICE void Advance(Cursor* at) const {
    OfKeys(*at) ? AdvanceKeys(at) : AdvanceValues(at);
  }
  KVASIR_DEVICE void AdvanceKeys(Cursor* at) const {
    if (at->part >= 0 && !IsLastPart(*at)) {
      ++at->part;
    } else if (++at->chunk < num_keys) {
      if (at->part > 0) at->part = 0;
    } else if (at->part < 0 && keys.HasExact(at->block)) {
      *at = {0, at->block, 0};
    } else {
      *at = at->block + 1 < keys.end() ? BlockOfKeys(at->block + 1)
                                       : ChunkOfValues(num_keys);
    }
  }
  KVASIR_DEVICE void AdvanceValues(Cursor* at) const {
    ++at->block;
    if (at->part < 0) {
      if (at->block < values.codec_end()) return;
      *at = values.any_exact() ? PartOfValues(at->chunk, 0)
                               : ChunkOfValues(at->chunk + 1);
      return;
    }
    at->block = values.ExactFrom(at->block);
    if (at->block < values.end()) return;
    *at = IsLastPart(*at) ? ChunkOfValues(at->chunk + 1)
                          : PartOfValues(at->chunk, at->part + 1);
  }
};

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
