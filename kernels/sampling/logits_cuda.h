// A row of logits in the hands of one CTA: what the kernels of this room share.
// C++17, device code.
#pragma once

#include <cmath>

#include "kernels/sampling/log_softmax.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kLogitThreads = 512;
inline constexpr uint32_t kLogitWarps = kLogitThreads / simt::kWarp;

KVASIR_DEVICE float Lowest() { return simt::BitsAs<float>(0xff800000u); }

// What a block of kVocabBlock logits adds to a row's state, in shared memory.
struct alignas(16) LogitBlock {
  float max;
  float sum;            // of exp(logit - max)
  float before, after;  // the state's maximum
};
// Bytes of them, for a vocabulary.
inline uint32_t LogitBlocksBytes(int64_t vocab) {
  return static_cast<uint32_t>((vocab + kVocabBlock - 1) / kVocabBlock) *
         static_cast<uint32_t>(sizeof(LogitBlock));
}

// What half a warp finds of `count` logits (none: nothing), in its 16 lanes and
// their tree: AddLogitBlock's order. Both halves of a warp come here together.
KVASIR_DEVICE LogitBlock BlockOf(const float* logits, int64_t count) {
  constexpr uint32_t kHalf = simt::kWarp / 2;
  static_assert(kHalf == static_cast<uint32_t>(kLanes), "a lane to each sum");
  float max = Lowest();
  for (int64_t i = simt::Lane() % kHalf; i < count; i += kHalf) {
    const float logit = simt::LoadGlobal(logits + i);
    max = logit > max ? logit : max;
  }
  for (uint32_t lanes = kHalf / 2; lanes > 0; lanes /= 2) {
    const float other = simt::ShuffleXor(max, lanes);
    max = other > max ? other : max;
  }
  float sum = 0.0f;
  for (int64_t i = simt::Lane() % kHalf; i < count; i += kHalf) {
    const float logit = simt::LoadGlobal(logits + i);
    sum = sum + simt::Fma(logit, 0.0f, Exp(logit - max));
  }
  for (uint32_t lanes = kHalf / 2; lanes > 0; lanes /= 2) {
    sum = sum + simt::ShuffleXor(sum, lanes);
  }
  // All of them -infinity: no number, as from any other that is not finite.
  return {max, max == Lowest() ? simt::BitsAs<float>(0x7fc00000u) : sum, 0.0f,
          0.0f};
}

// Adds a row's logits to thread 0's state, with the bits of AddLogitBlock and
// MergeLogitBlock. `blocks` has LogitBlocksBytes(count), and is this call's
// own.
KVASIR_DEVICE void AddLogits(const float* logits, int64_t count,
                             LogitBlock* blocks, LogSoftmaxState* state) {
  const auto num_blocks =
      static_cast<int32_t>((count + kVocabBlock - 1) / kVocabBlock);
  const auto thread = static_cast<int32_t>(simt::Thread());
  for (auto first = static_cast<int32_t>(2 * simt::Warp()); first < num_blocks;
       first += 2 * int32_t{kLogitWarps}) {
    const int32_t block = first + static_cast<int32_t>(simt::Lane() / 16);
    const int64_t begin = block * kVocabBlock;
    const LogitBlock found =
        BlockOf(logits + begin,
                count - begin < kVocabBlock ? count - begin : kVocabBlock);
    if (block < num_blocks && simt::Lane() % 16 == 0) {
      simt::StoreShared(&blocks[block].max, found.max);
      simt::StoreShared(&blocks[block].sum, found.sum);
    }
  }
  // The chain of states is short in each of its steps: maxima by one thread,
  // both factors of each sum by all, and one fused multiply-add to a block.
  simt::SyncCta();
  if (thread == 0) {
    float max = state->max;
    for (int32_t i = 0; i < num_blocks; ++i) {
      simt::StoreShared(&blocks[i].before, max);
      const float other = simt::LoadShared(&blocks[i].max);
      max = other > max ? other : max;
      simt::StoreShared(&blocks[i].after, max);
    }
    state->max = max;
  }
  simt::SyncCta();
  for (int32_t i = thread; i < num_blocks; i += int32_t{kLogitThreads}) {
    const LogitBlock block = simt::LoadShared(blocks + i);
    simt::StoreShared(&blocks[i].before, Exp(block.before - block.after));
    simt::StoreShared(&blocks[i].sum, block.sum * Exp(block.max - block.after));
  }
  simt::SyncCta();
  if (thread == 0) {
    for (int32_t i = 0; i < num_blocks; ++i) {
      state->sum = simt::Fma(state->sum, simt::LoadShared(&blocks[i].before),
                             simt::LoadShared(&blocks[i].sum));
    }
  }
}

// LogProbability's bits, as far as the logarithm of float64 has them (a GPU's:
// within 1 ulp of float64).
KVASIR_DEVICE float LogProbabilityOf(float logit,
                                     const LogSoftmaxState& state) {
  return static_cast<float>(
      (static_cast<double>(logit) - static_cast<double>(state.max)) -
      std::log(static_cast<double>(state.sum)));
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
