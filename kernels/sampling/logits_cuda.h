// Functions with which one CTA reads and sums a row of logits, for the kernels
// in this folder. C++17, device code.
#pragma once

#include <cmath>

#include "kernels/sampling/log_softmax.h"
#include "kernels/simd/scalar_math.h"
#include "kernels/simt/grid.h"
#include "kernels/simt/memory.h"
#include "kernels/simt/numbers.h"
#include "kernels/simt/rows.h"
#include "kernels/simt/warp.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

inline constexpr uint32_t kLogitThreads = 512;
inline constexpr uint32_t kLogitWarps = kLogitThreads / simt::kWarp;

KVASIR_DEVICE float Lowest() { return simt::BitsAs<float>(0xff800000u); }

// The contribution of one block of kVocabBlock logits to a row's
// LogSoftmaxState. Kernels keep LogitBlocks in shared memory.
struct alignas(16) LogitBlock {
  float max;
  float sum;            // sum of exp(logit - max)
  float before, after;  // the state's maximum before and after this block
};
// Returns how many bytes the LogitBlocks of a whole vocabulary take.
inline uint32_t LogitBlocksBytes(int64_t vocab) {
  return static_cast<uint32_t>((vocab + kVocabBlock - 1) / kVocabBlock) *
         static_cast<uint32_t>(sizeof(LogitBlock));
}

// Returns whether rows consist of whole packs of 4 logits, aligned to 16 bytes.
// If so, kernels read packs of n = 4 logits, otherwise n is 1. Pack i belongs
// to thread i % kLogitThreads.
template <typename Args>
bool HasWideRows(const Args& args, int64_t columns) {
  return simt::WideRows<float>(columns, args.logits) &&
         args.row_stride % simt::kWidePack<float> == 0;
}

// Calls visit(id, logit) for the logits of this thread's packs, in ascending
// order of ids. Reads `ahead` logits at a time and then visits these.
template <int n, int ahead, typename Visit>
KVASIR_DEVICE void ForLogits(const float* logits, int32_t vocab,
                             const Visit& visit) {
  static_assert(ahead % n == 0, "`ahead` must be whole packs of n logits");
  constexpr auto kThreads = static_cast<int32_t>(kLogitThreads);
  const auto* const packs =
      reinterpret_cast<const simt::Pack<float, n>*>(logits);
  const int32_t count = vocab / n;
  KVASIR_NO_UNROLL
  for (auto first = static_cast<int32_t>(simt::Thread()); first < count;
       first += ahead / n * kThreads) {
    simt::Pack<float, n> read[ahead / n];
    KVASIR_UNROLL
    for (int i = 0; i < ahead / n; ++i) {
      const int32_t pack = first + i * kThreads;
      if (pack < count) read[i] = simt::LoadGlobal(packs + pack);
    }
    KVASIR_UNROLL
    for (int i = 0; i < ahead / n; ++i) {
      const int32_t pack = first + i * kThreads;
      if (pack >= count) continue;
      KVASIR_UNROLL
      for (int k = 0; k < n; ++k) visit(n * pack + k, read[i].number[k]);
    }
  }
}

// Combines the 16 lanes of AddLogitBlock into one number by join(a, b): first
// lanes that are 8 apart, then 4, 2 and 1. Each of 16 / n neighbouring threads
// has n of the lanes. All threads of the warp must call this function.
template <int n, typename Join>
KVASIR_DEVICE float OverLanes(float (&lanes)[n], const Join& join) {
  KVASIR_UNROLL
  for (int apart = kLanes / 2; apart > 0; apart /= 2) {
    KVASIR_UNROLL
    for (int k = 0; k < (apart < n ? apart : n); ++k) {
      lanes[k] = join(
          lanes[k],
          apart < n
              ? lanes[(k + apart) % n]
              : simt::ShuffleXor(lanes[k], static_cast<uint32_t>(apart / n)));
    }
  }
  return lanes[0];
}

// Returns the LogitBlock of `count` logits (`count` may be 0). A group of 16 /
// n threads computes it, in the order of AddLogitBlock. All threads of the warp
// must call it.
template <int n>
KVASIR_DEVICE LogitBlock BlockOf(const float* logits, int64_t count) {
  // how many packs are read before the first of them is used
  constexpr int kAhead = 8;
  const auto first = static_cast<int32_t>(
      n * (simt::Lane() % static_cast<uint32_t>(kLanes / n)));
  const auto end = static_cast<int32_t>(count);
  // Calls visit(lane, logit) for the thread's logits.
  const auto for_logits = [&](const auto& visit) {
    KVASIR_NO_UNROLL
    for (int32_t turn = first; turn < end; turn += kAhead * kLanes) {
      simt::Pack<float, n> read[kAhead];
      KVASIR_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        const int32_t at = turn + i * kLanes;
        if (at < end) {
          read[i] = simt::LoadGlobal(
              reinterpret_cast<const simt::Pack<float, n>*>(logits + at));
        }
      }
      KVASIR_UNROLL
      for (int i = 0; i < kAhead; ++i) {
        if (turn + i * kLanes >= end) continue;
        KVASIR_UNROLL
        for (int k = 0; k < n; ++k) visit(k, read[i].number[k]);
      }
    }
  };
  float lanes[n];
  for (float& lane : lanes) lane = Lowest();
  for_logits([&](int k, float logit) {
    lanes[k] = logit > lanes[k] ? logit : lanes[k];
  });
  const float max =
      OverLanes(lanes, [](float a, float b) { return a > b ? a : b; });
  for (float& lane : lanes) lane = 0.0f;
  for_logits([&](int k, float logit) {
    lanes[k] = lanes[k] + simt::Fma(logit, 0.0f, Exp(logit - max));
  });
  const float sum = OverLanes(lanes, [](float a, float b) { return a + b; });
  // If all logits are -infinity, the sum must be set to NaN here. If other
  // logits are not finite, it is NaN already.
  return {max, max == Lowest() ? simt::BitsAs<float>(0x7fc00000u) : sum, 0.0f,
          0.0f};
}

// Adds a row's logits to the `state` of thread 0, with the same bits as
// AddLogitBlock and MergeLogitBlock. `blocks` has LogitBlocksBytes(count) bytes
// of shared memory, which no other call may use.
template <int n>
KVASIR_DEVICE void AddLogits(const float* logits, int64_t count,
                             LogitBlock* blocks, LogSoftmaxState* state) {
  constexpr uint32_t kTeam = static_cast<uint32_t>(kLanes / n);
  constexpr auto kOfWarp = static_cast<int32_t>(simt::kWarp / kTeam);
  const auto num_blocks =
      static_cast<int32_t>((count + kVocabBlock - 1) / kVocabBlock);
  const auto thread = static_cast<int32_t>(simt::Thread());
  for (auto first = kOfWarp * static_cast<int32_t>(simt::Warp());
       first < num_blocks; first += kOfWarp * int32_t{kLogitWarps}) {
    const int32_t block = first + static_cast<int32_t>(simt::Lane() / kTeam);
    const int64_t begin = block * kVocabBlock;
    const LogitBlock found =
        BlockOf<n>(logits + begin,
                   count - begin < kVocabBlock ? count - begin : kVocabBlock);
    if (block < num_blocks && simt::Lane() % kTeam == 0) {
      simt::StoreShared(&blocks[block].max, found.max);
      simt::StoreShared(&blocks[block].sum, found.sum);
    }
  }
  // Blocks must be added to the state one after the other, so the serial work
  // is kept small. One thread computes the running maxima. Then all threads
  // compute the two factors for each block's sum. This leaves one fused
  // multiply-add per block to do serially.
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

// Like LogProbability on a CPU, except that the float64 logarithms of a GPU and
// a CPU may differ by 1 ulp.
KVASIR_DEVICE float LogProbabilityOf(float logit,
                                     const LogSoftmaxState& state) {
  return static_cast<float>(
      (static_cast<double>(logit) - static_cast<double>(state.max)) -
      std::log(static_cast<double>(state.sum)));
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
