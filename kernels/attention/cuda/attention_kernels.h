// The names of the GPU kernels that compute a layer's attention, for reports.
#pragma once

#include <string>

namespace kvasir::kernels {

// The kernels for decoding and for prompts. All strings are empty on a CPU.
struct AttentionKernels {
  std::string decode;
  std::string prompts;
  // The reason why the layer cannot use the kernels for tensor cores, or why
  // its prompts cannot use attention_prefill. Empty if it uses both.
  std::string why;

  friend bool operator==(const AttentionKernels&,
                         const AttentionKernels&) = default;
};

}  // namespace kvasir::kernels
