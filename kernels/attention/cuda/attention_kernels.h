// The names of the GPU kernels that compute a layer's attention, which reports
// show.
#pragma once

#include <string>

namespace kvasir::kernels {

// The kernels for decoding and for prompts, and why they are not faster ones.
// All strings are empty on a CPU.
struct AttentionKernels {
  std::string decode;
  std::string prompts;
  // Why the layer cannot use kernels for tensor cores, or why prompts cannot
  // use attention_prefill; empty if both are used.
  std::string why;

  friend bool operator==(const AttentionKernels&,
                         const AttentionKernels&) = default;
};

}  // namespace kvasir::kernels
