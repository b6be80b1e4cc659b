// Launches the kernel attention_prefill (prefill_attention-inl.h) for
// paged_attention_cuda.cu. The kernel is in a source file of its own
// (prefill_attention_cuda.cu), because it takes minutes to compile. C++17, host
// code.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// Returns the number of CTAs of a persistent grid. Each multiprocessor gets as
// many as fit into its shared memory, but at most `most`. The GPU reserves 1024
// bytes for each CTA in addition to `shared_bytes`.
inline uint32_t StayingCtas(const AttentionDevice& device,
                            uint32_t shared_bytes, int64_t most,
                            const Launcher& launcher) {
  constexpr int64_t kReserved = 1024;
  const int64_t room = (device.cta_shared_bytes + kReserved) /
                       (int64_t{shared_bytes} + kReserved);
  return static_cast<uint32_t>((room < most ? room : most) *
                               launcher.multiprocessors());
}

// Returns the launch of attention_prefill for a layer with prompt_rows > 0.
KernelLaunch PromptLaunch(const AttentionDevice& device,
                          const Launcher& launcher);
// Enqueues the launch that PromptLaunch returned. Must be called after
// attention_divide is enqueued.
void LaunchPrompts(const AttentionKernelArgs& args, const KernelLaunch& launch,
                   Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
