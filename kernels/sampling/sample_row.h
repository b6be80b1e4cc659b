// Samples an id from one row on a CPU. Both back ends use this code; only their
// loops over the whole vocabulary differ (SampleLoops).
#pragma once

#include <cstdint>

#include "kernels/sampling/log_softmax.h"
#include "kernels/sampling/sample.h"

namespace kvasir::kernels {

struct SampleLoops {
  bool (*all_finite)(const float* x, int64_t count);
  LogitBlockFunction add_logit_block;
  // Returns the lowest index of the largest element; -1 if no element is above
  // -infinity.
  int64_t (*arg_max)(const float* x, int64_t count);
  // out[i] = exp((x[i] - max) / temperature)
  void (*exp_all)(const float* x, int64_t count, float max, float temperature,
                  float* out);
};

// Scratch of one thread; each array has V elements.
struct SampleScratch {
  float* logits;   // logits after penalties, biases, bans and the mask
  float* weights;  // exp((logit - max) / temperature)
  int32_t* order;  // ids, of which only as many as needed are sorted

  static int64_t Bytes(int64_t vocab) { return (vocab * 12 + 63) / 64 * 64; }
  static SampleScratch Of(void* memory, int64_t vocab, int thread) {
    char* base = static_cast<char*>(memory) + Bytes(vocab) * thread;
    auto* logits = reinterpret_cast<float*>(base);
    return {logits, logits + vocab,
            reinterpret_cast<int32_t*>(logits + 2 * vocab)};
  }
};

void SampleOneRow(const SampleArgs& params, int64_t row,
                  const SampleScratch& scratch, const SampleLoops& loops);

}  // namespace kvasir::kernels
