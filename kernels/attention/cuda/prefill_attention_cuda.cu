// The kernel attention_prefill, which computes prompts for paged_attention
// (paged_attention_cuda.cu). The CTAs of a persistent grid take items one by
// one and compute them with prefill_attention-inl.h. The first comment of that
// file has the memory traffic, the operations and the lower bound of the time.
#include "kernels/attention/cuda/prefill_attention-inl.h"
#include "kernels/attention/cuda/prefill_attention.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

// The number of CTAs that should fit on a multiprocessor. nvcc limits the
// registers of a thread accordingly.
constexpr int kPromptCtas = 2;

template <typename T, int32_t tiles>
KVASIR_KERNEL_OF(kPrefillThreads, kPromptCtas)
PrefillKernel(AttentionKernelArgs args) {
  PrefillAttention<T, tiles> attention(args);
  SequenceItems* const total = args.items + args.num_sequences;
  const auto count = static_cast<uint32_t>(total->first_prompt);
  uint32_t i = simt::CtaX();
  uint32_t* next = attention.next_item();
  while (i < count) {
    // Items are taken in reverse order, because with causal attention the last
    // items see the most slots and take longest.
    const Item item = FindPromptItem(args, static_cast<int32_t>(count - 1 - i));
    if (simt::Thread() == 0) {
      simt::StoreShared(next, simt::AtomicAdd(&total->next_prompt, 1u));
    }
    attention.Compute(item, args.device.unit_chunks[item.unit_index]);
    // Compute has barriers, so the index that one thread stored is now visible
    // to all threads. The next index is stored in the other word, because a
    // slow thread may then still be reading this one.
    i = simt::LoadShared(next);
    next = next == attention.next_item() ? next + 1 : next - 1;
  }
}

}  // namespace

KernelLaunch PromptLaunch(const AttentionDevice& device,
                          const Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "attention_prefill";
  launch.threads = kPrefillThreads;
  launch.shared_bytes =
      static_cast<uint32_t>(PromptSharedBytes(device, device.prompt_rows));
  launch.grid_x =
      StayingCtas(device, launch.shared_bytes, kPromptCtas, launcher);
  return launch;
}

void LaunchPrompts(const AttentionKernelArgs& args, const KernelLaunch& launch,
                   Launcher& launcher) {
  VisitDType(args.device.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (sizeof(T) == 2) {
      args.prompt_rows == PrefillAttention<T, 2>::kRows
          ? simt::Launch(launcher, launch, PrefillKernel<T, 2>, args)
          : simt::Launch(launcher, launch, PrefillKernel<T, 1>, args);
    }
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
