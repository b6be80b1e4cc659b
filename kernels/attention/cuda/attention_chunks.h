// Makes the chunks of latents that tensor cores read (LatentChunkOnDevice).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/cuda/device_attention.h"

namespace kvasir::kernels {

// The chunks of a layer and the tables of AttentionDevice that describe them,
// in host memory.
struct HostChunks {
  std::vector<LatentChunkOnDevice> chunks;
  std::vector<UnitChunks> units;
  int64_t query_stride = 0;
  int64_t digit_stride = 0;
  struct Levels {
    std::vector<float> levels;
    bool of_keys = false;
  };
  std::vector<Levels> levels;
  // The reason why tensor cores cannot be used, if there are no units.
  std::string why_none;
};

// Makes the chunks of all units. If the codec, layout or size of some part does
// not allow chunks, the result has no units and `why_none` is set. The latents
// of a part must be stored in aligned pieces of 16 bytes. They are numbers of
// the activations' type, in a multiple of 8 channels, or codes with float16
// ranges in slots, with static ranges, or with levels. Each run of codes must
// fill whole pieces. If codes are in two planes, the low plane must fill whole
// pieces, and the high bits that belong to one of these pieces must not be in
// two pieces.
// The part's exact rows must also be stored in aligned pieces and have the
// activations' type. In the result, `head_column` points to host memory.
HostChunks MakeChunks(const PagedAttentionArgs& params,
                      const std::vector<int32_t>& heads,
                      const std::vector<HeadUnit>& units);

}  // namespace kvasir::kernels
