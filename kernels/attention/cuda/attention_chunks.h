// Makes the chunks of latents that tensor cores read (LatentChunkOnDevice).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/attention/cuda/device_attention.h"

namespace kvasir::kernels {

// `levels` are those of AttentionDevice, in host memory.
struct HostChunks {
  std::vector<LatentChunkOnDevice> chunks;
  std::vector<UnitChunks> units;
  int64_t query_stride = 0;
  struct Levels {
    std::vector<float> levels;
    bool of_keys = false;
  };
  std::vector<Levels> levels;
  std::string why_none;  // the reason, if there are no units
};

// Makes the chunks of all units. There are none if some part cannot have
// chunks, because of its codec, layout or sizes. A part can if it has
//   - numbers of the activations' type, in a multiple of 8 channels; or
//   - codes of 8 or 4 bits in runs of whole pieces, with float16 ranges in
//   slots
//     or with 16 levels, in pieces of 16 aligned bytes;
// and if its exact rows have the activations' type and whole such pieces. The
// parts' `column` lists are host memory.
HostChunks MakeChunks(const PagedAttentionArgs& params,
                      const std::vector<int32_t>& heads,
                      const std::vector<HeadUnit>& units);

}  // namespace kvasir::kernels
