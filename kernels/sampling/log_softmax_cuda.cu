// log_softmax on a GPU: one CTA per row, with the same bits as on a CPU. A
// group of threads (4 if rows are aligned, otherwise 16) computes a block of
// 1024 logits, in the 16 lanes and the order of log_softmax.h. With aligned
// rows of 128K logits, each group has one block.
//
// Layout: float32 logits, rows row_stride apart. If rows consist of whole,
// aligned packs of 16 bytes, a warp reads eight runs of 64 bytes at a time.
// Otherwise 16 threads read a block, so a warp reads two such runs at a time.
// Each thread has eight reads in flight.
//
// Bytes of a row: 4 V from memory, and once more from the caches. Operations:
// about 20 per logit for its exponential.
//
// Shortest possible time: if there are as many rows as multiprocessors, the
// bytes divided by the memory's bandwidth. A single row takes as long as one
// multiprocessor needs to read it.
#include "kernels/sampling/log_softmax.h"
#include "kernels/sampling/logits_cuda.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

template <int n>
KVASIR_KERNEL(kLogitThreads)
LogSoftmaxKernel(LogSoftmaxArgs args) {
  const int64_t row = simt::CtaX();
  const float* const logits = args.logits + row * args.row_stride;
  const bool decides = simt::Thread() == 0;
  LogSoftmaxState state = {Lowest(), 0.0f, Lowest()};
  if (decides && args.vocab_begin > 0) state = args.state[row];
  AddLogits<n>(logits, args.vocab_count,
               reinterpret_cast<LogitBlock*>(simt::Shared()), &state);
  if (!decides) return;
  const int64_t target = args.targets[row] - args.vocab_begin;
  if (target >= 0 && target < args.vocab_count) {
    state.target_logit = simt::LoadGlobal(logits + target);
  }
  args.state[row] = state;
  if (args.last) {
    args.logprobs[row] = LogProbabilityOf(state.target_logit, state);
  }
}

}  // namespace

void LogSoftmaxCuda(const LogSoftmaxArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "log_softmax";
  launch.grid_x = simt::Ctas(args.num_rows);
  launch.threads = kLogitThreads;
  launch.shared_bytes = LogitBlocksBytes(args.vocab_count);
  simt::Launch(launcher, launch,
               HasWideRows(args, args.vocab_count) ? LogSoftmaxKernel<4>
                                                   : LogSoftmaxKernel<1>,
               args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
