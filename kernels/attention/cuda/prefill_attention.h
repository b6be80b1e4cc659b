// Launches attention_prefill (prefill_attention-inl.h) for
// paged_attention_cuda.cu. It has a source file of its own because it takes
// minutes to compile. C++17, host code.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// The number of persistent CTAs: as many as fit the shared memory of all
// multiprocessors, but at most `most` on each. The GPU reserves 1024 bytes for
// each CTA in addition to its own.
inline uint32_t StayingCtas(const AttentionDevice& device,
                            uint32_t shared_bytes, int64_t most,
                            const Launcher& launcher) {
  constexpr int64_t kReserved = 1024;
  const int64_t room = (device.cta_shared_bytes + kReserved) /
                       (int64_t{shared_bytes} + kReserved);
  return static_cast<uint32_t>((room < most ? room : most) *
                               launcher.multiprocessors());
}

// Returns the launch for a layer with prompt_rows > 0.
KernelLaunch PromptLaunch(const AttentionDevice& device,
                          const Launcher& launcher);
// Enqueues the launch that PromptLaunch returned, after attention_divide.
void LaunchPrompts(const AttentionKernelArgs& args, const KernelLaunch& launch,
                   Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
