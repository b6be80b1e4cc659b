// Finds the top of a row of logits with one CTA. The top is the shortest prefix
// of the ids, in the order of sample.h, that has a given number of ids or a
// given share of the sum of weights. C++17, device code.
//
// A first pass counts and weighs the ids above six cuts at fixed distances from
// the largest logit. The end of the searched prefix (the border) lies between
// two neighbouring cuts: the last cut whose prefix is too small, and the first
// cut whose prefix is large enough.
//
// If more than kSortedIds ids are between these two cuts, another pass splits
// this interval by five cuts at equal distances. The distances are measured
// alternately in logits and in keys (bits of the logit, then the id). Finally,
// the remaining ids are sorted in shared memory, and one thread goes through
// them in order until the prefix is complete.
//
// Each pass reads the row (4 V bytes for V ids) and computes exponentials only
// within its interval. A typical row of 128K ids takes two or three passes, a
// row of equal logits about ten, and no row more than kMostSplits.
//
// Weights are summed in float64, in an order of threads and lanes that depends
// only on the length of the row.
#pragma once

#include "kernels/sampling/logits_cuda.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {

// The most ids that are sorted in shared memory at a time.
inline constexpr uint32_t kSortedIds = 2048;

template <typename T>
KVASIR_DEVICE T ShuffleWide(T value, uint32_t lanes) {
  const auto bits = simt::BitsAs<uint64_t>(value);
  const uint64_t low = simt::ShuffleXor(static_cast<uint32_t>(bits), lanes);
  const uint64_t high =
      simt::ShuffleXor(static_cast<uint32_t>(bits >> 32), lanes);
  return simt::BitsAs<T>(high << 32 | low);
}

// Maps floats to integers so that a larger float has a larger integer. -0 and 0
// have the same integer.
KVASIR_DEVICE uint32_t OrderOf(float x) {
  const auto bits = simt::BitsAs<uint32_t>(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
KVASIR_DEVICE float OfOrder(uint32_t order) {
  return simt::BitsAs<float>(order ^
                             ((order >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

KVASIR_DEVICE bool IsFinite(float x) { return x * 0.0f == 0.0f; }

// The key by which ids are ordered, smallest key first: larger logits come
// first, and ids of equal logits are in ascending order.
using TopKey = uint64_t;
inline constexpr TopKey kEndOfRow = ~TopKey{0};  // after all ids
KVASIR_DEVICE TopKey KeyOf(float logit, int32_t id) {
  return TopKey{~OrderOf(logit)} << 32 | static_cast<uint32_t>(id);
}
KVASIR_DEVICE float LogitOf(TopKey key) {
  return OfOrder(~static_cast<uint32_t>(key >> 32));
}
KVASIR_DEVICE int32_t IdOf(TopKey key) {
  return static_cast<int32_t>(static_cast<uint32_t>(key));
}
// Returns the smallest key that is after the keys of all ids with this logit or
// a larger one.
KVASIR_DEVICE TopKey BehindLogit(float logit) {
  return (TopKey{~OrderOf(logit)} + 1) << 32;
}

// Returns the smallest of all threads' keys. `partial` is shared memory that no
// other call may use.
KVASIR_DEVICE TopKey FirstKey(TopKey key, TopKey* partial,
                              simt::Site site = simt::Site::Here()) {
  for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
    const TopKey other = ShuffleWide(key, lanes);
    key = other < key ? other : key;
  }
  if (simt::Lane() == 0) simt::StoreShared(partial + simt::Warp(), key);
  simt::SyncCta(site);
  for (uint32_t warp = 0; warp < kLogitWarps; ++warp) {
    const TopKey other = simt::LoadShared(partial + warp);
    key = other < key ? other : key;
  }
  return key;
}

// Sorts keys in ascending order by a sorting network. Every exchange moves the
// larger key upwards, so the network works for any number of keys.
KVASIR_DEVICE void Sort(TopKey* keys, uint32_t count) {
  uint32_t whole = 1;
  while (whole < count) whole *= 2;
  for (uint32_t size = 2; size <= whole; size *= 2) {
    for (uint32_t apart = size / 2; apart > 0; apart /= 2) {
      // The first round of each size compares keys at mirrored positions. Later
      // rounds compare keys at a fixed distance.
      const uint32_t flip = apart == size / 2 ? 2 * apart - 1 : apart;
      for (uint32_t i = simt::Thread(); i < whole / 2; i += kLogitThreads) {
        const uint32_t low = i / apart * 2 * apart + i % apart;
        const uint32_t high = low ^ flip;
        if (high >= count) continue;
        const TopKey a = keys[low];
        const TopKey b = keys[high];
        if (a > b) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      simt::SyncCta();
    }
  }
}

// A prefix of a row's ids: the ids before the key `end`, the sum of their
// weights, and their number.
struct Prefix {
  TopKey end;
  double mass;
  uint32_t count;
};

// The goal of a search for a prefix. A prefix meets the goal if it reaches at
// least one of these limits.
struct Goal {
  uint32_t count = ~0u;  // number of ids
  double mass = 1e300;   // sum of weights
  bool above = false;    // the sum must exceed `mass`, not only reach it
  TopKey end = kEndOfRow;

  KVASIR_DEVICE bool Has(const Prefix& prefix) const {
    return prefix.count >= count || prefix.end >= end ||
           (above ? prefix.mass > mass : prefix.mass >= mass);
  }
};

// A row and the parameters that determine the order and the weights of its ids.
struct TopOrder {
  const float* logits;
  int32_t vocab;
  float max;
  float temperature;
  // True: ForKeys visits only ids whose weight, exp((logit - max) /
  // temperature), is above 0. False: it visits all ids, with a weight of 0.
  bool weighs;

  KVASIR_DEVICE float Weight(float logit) const {
    return Exp((logit - max) / temperature);
  }
  KVASIR_DEVICE TopKey begin() const { return KeyOf(max, 0); }
  // Calls visit(key, weight) for the ids in [begin, end) that belong to the
  // thread.
  template <int n, typename Visit>
  KVASIR_DEVICE void ForKeys(TopKey begin, TopKey end,
                             const Visit& visit) const {
    ForLogits<n, 4>(logits, vocab, [&](int32_t id, float logit) {
      const TopKey key = KeyOf(logit, id);
      if (key < begin || key >= end) return;
      const float weight = weighs ? Weight(logit) : 0.0f;
      if (!weighs || weight > 0.0f) visit(key, weight);
    });
  }
};

// The cuts of an interval, in ascending order: five keys inside it, and its
// end. More cuts would not fit into registers.
inline constexpr int kCuts = 6;
struct TopCuts {
  TopKey key[kCuts];
};
// For each cut, the prefix of the ids before it. TopMarks are in shared memory.
struct TopMarks {
  Prefix prefix[kCuts];
};
struct SplitMemory {
  TopKey key[kCuts];
  double mass[kCuts][kLogitWarps];
  uint32_t count[kCuts][kLogitWarps];
};

// Returns cuts for the first pass, at distances of 1.5, 3, 5, 7.5 and 10.5
// temperatures from the largest logit. The last cut is at 88 temperatures,
// below which weights are 0, or at the end of the row if ids are not weighed.
KVASIR_DEVICE TopCuts CutsOfRow(const TopOrder& order) {
  TopCuts cuts;
  TopKey before = order.begin();
  KVASIR_UNROLL
  for (int i = 0; i < kCuts; ++i) {
    const float distance =
        i < kCuts - 1 ? 0.25f * static_cast<float>((i + 2) * (i + 3)) : 88.0f;
    const TopKey key =
        i == kCuts - 1 && !order.weighs
            ? kEndOfRow
            : BehindLogit(order.max - distance * order.temperature);
    before = key > before ? key : before;
    cuts.key[i] = before;
  }
  return cuts;
}
// Returns cuts that divide the interval [begin, end) of keys at equal
// distances, measured in logits (if by_value) or in keys.
KVASIR_DEVICE TopCuts CutsBetween(TopKey begin, TopKey end, bool by_value,
                                  int32_t vocab) {
  // The key after all ids whose logit equals the first logit of the interval.
  const TopKey last = (begin >> 32) << 32 | static_cast<uint32_t>(vocab);
  const TopKey near =
      begin < last && last < end && (begin >> 32) == (end - 1) >> 32 ? last
                                                                     : end;
  const TopKey step = (near - begin) / kCuts;
  const float top = LogitOf(begin);
  const float part = (LogitOf(end) - top) * (1.0f / static_cast<float>(kCuts));
  constexpr TopKey kFewLogits = TopKey{64} << 32;
  by_value =
      by_value && end - begin > kFewLogits && IsFinite(part) && IsFinite(top);
  TopCuts cuts;
  KVASIR_UNROLL
  for (int i = 0; i < kCuts - 1; ++i) {
    const auto times = static_cast<TopKey>(i + 1);
    TopKey key = step > 0 ? begin + step * times : begin + times;
    // If many ids have the first logit of the interval, this cut separates them
    // from the other ids.
    if (i == 0 && BehindLogit(top) < key) key = BehindLogit(top);
    if (by_value) key = BehindLogit(top + part * static_cast<float>(i + 1));
    key = key < begin ? begin : key;
    cuts.key[i] = key < end ? key : end;
  }
  cuts.key[kCuts - 1] = end;
  return cuts;
}

// Computes for each cut the mark: the prefix that consists of `from` and the
// ids from there to the cut. All threads can read the marks when it returns.
template <int n>
KVASIR_DEVICE void Split(const TopOrder& order, const Prefix& from,
                         const TopCuts& cuts, SplitMemory* memory,
                         TopMarks* marks) {
  double mass[kCuts] = {};
  uint32_t count[kCuts] = {};
  order.ForKeys<n>(from.end, cuts.key[kCuts - 1],
                   [&](TopKey key, float weight) {
                     const auto wide = static_cast<double>(weight);
                     mass[kCuts - 1] += wide;
                     ++count[kCuts - 1];
                     if (key >= cuts.key[kCuts - 2]) return;
                     KVASIR_UNROLL
                     for (int i = 0; i < kCuts - 1; ++i) {
                       if (key < cuts.key[i]) {
                         mass[i] += wide;
                         ++count[i];
                       }
                     }
                   });
  KVASIR_UNROLL
  for (int i = 0; i < kCuts; ++i) {
    for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
      mass[i] += ShuffleWide(mass[i], lanes);
      count[i] += simt::ShuffleXor(count[i], lanes);
    }
    if (simt::Lane() == 0) {
      simt::StoreShared(&memory->mass[i][simt::Warp()], mass[i]);
      simt::StoreShared(&memory->count[i][simt::Warp()], count[i]);
    }
    if (simt::Thread() == 0) simt::StoreShared(&memory->key[i], cuts.key[i]);
  }
  simt::SyncCta();
  if (const uint32_t i = simt::Thread(); i < uint32_t{kCuts}) {
    Prefix sum = from;
    sum.end = simt::LoadShared(&memory->key[i]);
    for (uint32_t warp = 0; warp < kLogitWarps; ++warp) {
      sum.mass += simt::LoadShared(&memory->mass[i][warp]);
      sum.count += simt::LoadShared(&memory->count[i][warp]);
    }
    marks->prefix[i] = sum;
  }
  simt::SyncCta();
}

// The border, which is the end of the searched prefix, lies between these two
// prefixes. `from` is too small. `to` meets the goal, unless no prefix does.
struct TopInterval {
  Prefix from, to;
};

// Returns the part of `interval` in which the border lies: between two
// neighbouring marks, or between a mark and an end of the interval. The result
// has at least one id. So a mark whose prefix has all ids of the interval ends
// the result, even if rounding leaves its weights just below the goal.
KVASIR_DEVICE TopInterval Between(const TopMarks& marks, const Goal& goal,
                                  TopInterval interval) {
  for (int i = 0; i < kCuts; ++i) {
    const Prefix& mark = marks.prefix[i];
    if (mark.end <= interval.from.end) continue;
    if (mark.end >= interval.to.end) break;
    if (goal.Has(mark) || mark.count == interval.to.count) {
      interval.to = mark;
      break;
    }
    interval.from = mark;
  }
  return interval;
}

// The most splits of an interval. No row reaches this limit. A split at equal
// distances in keys reduces an interval of n keys to n / 6 + 5, or to n / 3 if
// the first cut is moved to the end of a logit (CutsBetween). A logit has 2^32
// keys. A row needs at most 53 splits:
// - 34 reduce the interval from 2^64 keys to 2^38 (64 logits): 17 splits in
//   keys, which divide by 3, each followed by a split in logits;
// - 2 reduce it to 2^35 keys, a sixth of which is hardly more than a logit;
//   both divide by 3;
// - 6 reduce it to the 2^20 ids of one logit: each divides by 6;
// - 11 reduce it to one id: 8 divide by 6, one divides by 3, and 2 are needed
//   because of the added 5.
// Tested by
// SampleCudaTest.TheSearchForTheTopIdsNeverNeedsMoreStepsThanItsLimit.
inline constexpr int kMostSplits = 64;

struct TopMemory {
  SplitMemory split;
  TopMarks row;     // marks of the first pass
  TopMarks within;  // marks of the latest Split
  uint32_t next;    // the index at which the next key is stored
};

// Narrows the interval in which the border lies, starting with the marks of the
// whole row. Stops when the interval has at most `most` ids or, if `whole`,
// when at most `most` ids precede its end.
template <int n>
KVASIR_DEVICE TopInterval Narrow(const TopOrder& order, const Goal& goal,
                                 const Prefix& limit, uint32_t most, bool whole,
                                 TopMemory* memory) {
  TopInterval interval =
      Between(memory->row, goal, {{order.begin(), 0.0, 0}, limit});
  KVASIR_NO_UNROLL
  for (int turn = 0;
       turn < kMostSplits &&
       interval.to.count - (whole ? 0 : interval.from.count) > most;
       ++turn) {
    Split<n>(order, interval.from,
             CutsBetween(interval.from.end, interval.to.end,
                         /*by_value=*/turn % 2 == 0, order.vocab),
             &memory->split, &memory->within);
    interval = Between(memory->within, goal, interval);
  }
  return interval;
}

// Writes the sorted keys of the ids in [begin, end) to `keys`. If there are
// more than `most`, writes `most` of them, chosen arbitrarily. Returns how many
// it wrote. *next must be 0 before the call.
template <int n>
KVASIR_DEVICE uint32_t TakeSorted(const TopOrder& order, TopKey begin,
                                  TopKey end, TopKey* keys, uint32_t most,
                                  uint32_t* next) {
  order.ForKeys<n>(begin, end, [&](TopKey key, float) {
    const uint32_t place = simt::AtomicAdd<simt::Scope::kCta>(next, 1u);
    if (place < most) keys[place] = key;
  });
  simt::SyncCta();
  const uint32_t found = simt::LoadShared(next);
  const uint32_t count = found < most ? found : most;
  Sort(keys, count);
  return count;
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
