// The choice of GPU kernels for a layer's attention, in words.
#pragma once

#include <string>

namespace kvasir::kernels {

// Which kernels of a GPU compute a layer's launches: for people. Empty of a
// CPU.
struct AttentionKernels {
  std::string decode;
  std::string prompts;
  // Why they are not tensor cores', or prompts have no kernel; or empty.
  std::string why;

  friend bool operator==(const AttentionKernels&,
                         const AttentionKernels&) = default;
};

}  // namespace kvasir::kernels
