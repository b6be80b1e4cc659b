// The latents of a launch as tensor cores take them (LatentChunkOnDevice).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/cuda/device_attention.h"

namespace kvasir::kernels {

// `levels`: as AttentionDevice has them, host's numbers.
struct HostChunks {
  std::vector<LatentChunkOnDevice> chunks;
  std::vector<UnitChunks> units;
  int64_t query_stride = 0;
  struct Levels {
    std::vector<float> levels;
    bool of_keys = false;
  };
  std::vector<Levels> levels;
  std::string why_none;  // where there are no units
};

// Of all units; none where a part has no chunks, because of its codec, its
// layout or its sizes: numbers of the activations' type, in a multiple of 8
// channels, and codes of 8 or 4 bits in runs of whole pieces with float16
// ranges in slots or with 16 levels, in pieces of 16 aligned bytes; exact rows
// of the activations' type, of whole such pieces.
// `columns` of parts are the host's.
HostChunks MakeChunks(const PagedAttentionArgs& params,
                      const std::vector<int32_t>& heads,
                      const std::vector<HeadUnit>& units);

}  // namespace kvasir::kernels
