// embedding on a GPU: one CTA per token.
//
// The output has the type args.dtype, whatever its pointer's type; sums are
// float32.
//
// Layout: rows of M numbers without gaps in the table, in a tied head
// (WeightLayout::kRows) and in learned positions.
//
// Bytes per token: M numbers of the table, M of the output and M of the learned
// positions, if there are any. Compared with the weights that a step reads,
// these are few. So numbers are moved one at a time. Shortest possible time:
// the bytes divided by the memory's bandwidth.
#include "kernels/rowwise/embedding.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/rows.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr uint32_t kThreads = 256;

template <typename T>
KVASIR_KERNEL(kThreads)
EmbeddingKernel(EmbeddingArgs args) {
  const int64_t token = simt::CtaX();
  const int64_t id = simt::LoadGlobal(args.ids + token) - args.first_id;
  const bool known = id >= 0 && id < args.vocab;
  const int64_t position = args.position_table != nullptr
                               ? simt::LoadGlobal(args.positions + token)
                               : -1;
  const bool placed = position >= 0 && position < args.num_positions;
  const bool tied = args.table == nullptr;
  const void* const table = tied ? args.packed.data : args.table;
  const DType dtype = tied ? args.packed.dtype : args.table_dtype;
  T* const out = reinterpret_cast<T*>(args.out) + token * args.hidden;
  for (int64_t i = simt::Thread(); i < args.hidden; i += kThreads) {
    float number = known ? args.scale * simt::LoadNumber(table, dtype,
                                                         id * args.hidden + i)
                         : 0.0f;
    if (placed) {
      number += simt::LoadNumber(args.position_table, args.position_dtype,
                                 position * args.hidden + i);
    }
    simt::StoreGlobal(out + i, simt::FromFloat<T>(number));
  }
}

}  // namespace

void EmbeddingCuda(const EmbeddingArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "embedding";
  launch.grid_x = simt::Ctas(args.num_tokens);
  launch.threads = kThreads;
  VisitDType(args.dtype, [&](auto type) {
    simt::Launch(launcher, launch, EmbeddingKernel<decltype(type)>, args);
  });
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
