// attention_prefill (prefill_attention-inl.h), for paged_attention_cuda.cu: in
// a source of its own, since it takes minutes to compile. C++17, host code.
#pragma once

#include "kernels/attention/cuda/attention_items.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// CTAs that stay: as many as the shared memory of all multiprocessors has room
// for (each CTA takes 1024 bytes more), `most` to each.
inline uint32_t StayingCtas(const AttentionDevice& device,
                            uint32_t shared_bytes, int64_t most,
                            const Launcher& launcher) {
  constexpr int64_t kReserved = 1024;
  const int64_t room = (device.cta_shared_bytes + kReserved) /
                       (int64_t{shared_bytes} + kReserved);
  return static_cast<uint32_t>((room < most ? room : most) *
                               launcher.multiprocessors());
}

// Of a layer that has prompt_rows.
KernelLaunch PromptLaunch(const AttentionDevice& device,
                          const Launcher& launcher);
// What PromptLaunch says, behind attention_divide.
void LaunchPrompts(const AttentionKernelArgs& args, const KernelLaunch& launch,
                   Launcher& launcher);

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
