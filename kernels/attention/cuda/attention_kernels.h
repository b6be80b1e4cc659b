// Names of the GPU kernels that compute a layer's attention, for reports.
#pragma once

#include <string>

namespace kvasir::kernels {

// Names of the GPU kernels that compute a layer's launches, for people to read.
// All are empty for a CPU.
struct AttentionKernels {
  std::string decode;
  std::string prompts;
  // The reason if they are not kernels for tensor cores, or if prompts have no
  // kernel of their own; otherwise empty.
  std::string why;

  friend bool operator==(const AttentionKernels&,
                         const AttentionKernels&) = default;
};

}  // namespace kvasir::kernels
