// sample and count_tokens on a GPU: one CTA per row.
//
// A pack is 1 or 4 neighbouring ids. It belongs to the same thread in every
// pass, so penalties, biases, bans and the mask need no barrier. For a greedy
// row the id with the largest adjusted logit is the result.
//
// In rows that are not greedy, top-k, top-p, min-p and the draw are successive
// stages. Each stage finds the shortest prefix of the ids, in descending order
// of logits, that has the required count or share of the weights
// (top_ids_cuda.h). It searches within the prefix of the previous stage.
//
// Greedy choices, ties, filters, log probabilities and lists have the same bits
// as on a CPU (but see LogProbabilityOf). Only two float64 sums are added in
// another order: the sum of all weights, and the sum of the weights before an
// id that has more than 2048 ids before it. If no weight is below 2^-12, these
// sums are exact. Otherwise a random number within 1e-13 of the border between
// two ids may draw the other id, and the border of top-p may move.
//
// Layout: float32 logits, rows row_stride apart. They are read 16 bytes at a
// time if rows are aligned and consist of whole packs of 4 ids. Each row has
// scratch memory for V adjusted logits and, for a list of more than 2048 top
// ids, a key of 8 bytes per entry.
//
// Bytes of a greedy row of V logits: 4 V. Penalties or a mask add 8 V, biases
// or bans 12 V, a draw 8 V, log probabilities 8 V, and a list 8 V. These
// further bytes come from the second-level cache. If many ids are about equally
// likely, more than 2048 ids may be needed. The row is then usually read two to
// four times more, and at most kMostSplits times more.
//
// Operations: about 60 per logit with a draw. Each split (top_ids_cuda.h),
// which narrows down an interval of logits, takes about 100 per logit of the
// interval.
//
// Shortest possible time: one multiprocessor computes a row, so the row takes
// as long as this multiprocessor needs to read it. It reads 128K logits (0.5
// MB) in 8 thousand clocks at 64 bytes per clock. A draw from about equally
// likely ids takes about 300 thousand clocks, by estimate.
#include "kernels/sampling/logits_cuda.h"
#include "kernels/sampling/sample.h"
#include "kernels/sampling/top_ids_cuda.h"
#include "kernels/simt/launch.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr int32_t kThreads = int32_t{kLogitThreads};
static_assert(int64_t{kSortedIds} == kMostSharedTop,
              "longer lists need scratch for their keys");

struct SampleCall {
  SampleArgs args;
  char* scratch;
  // Bytes of scratch per row. The last logits_bytes of them hold the adjusted
  // logits.
  int64_t row_bytes, logits_bytes;
};

// The stages in their order: three filters, then the draw.
constexpr int kTopK = 0, kTopP = 1, kMinP = 2, kDraw = 3;
constexpr int kStages = kDraw + 1;

// A prefix of the row's ids in descending order of logits (sample.h), and the
// last id of this prefix.
struct Found {
  Prefix prefix;
  int32_t last;
};
struct SampleShared {
  TopKey keys[kSortedIds];
  float weights[kSortedIds];
  TopKey best[2][kLogitWarps], below[kLogitWarps];
  TopMemory drawn, listed;
  uint32_t next[kStages];
  Found found[kStages];
  LogSoftmaxState state;
};
static_assert(sizeof(SampleShared) % alignof(LogitBlock) == 0,
              "LogitBlocks follow it in shared memory");

// The largest of the logits that one thread visits, and its id. If several
// logits are equal, the lowest of their ids is kept.
struct BestLogit {
  float logit = Lowest();
  int32_t id = 0;

  KVASIR_DEVICE void Add(int32_t other_id, float other) {
    if (other > logit) {
      logit = other;
      id = other_id;
    }
  }
  // Returns kEndOfRow if no logit is above -infinity.
  KVASIR_DEVICE TopKey key() const {
    return logit > Lowest() ? KeyOf(logit, id) : kEndOfRow;
  }
};

template <int n>
KVASIR_DEVICE bool IsMine(int32_t id, int64_t vocab) {
  return id >= 0 && id < vocab &&
         id / n % kThreads == static_cast<int32_t>(simt::Thread());
}

KVASIR_DEVICE bool IsAllowed(const uint32_t* mask, int32_t id) {
  return mask == nullptr ||
         (simt::LoadGlobal(mask + id / 32) >> (id % 32) & 1u) != 0;
}

// Sets logits of banned ids to -infinity. Each thread does this for the ids
// that belong to it.
template <int n>
KVASIR_DEVICE void ApplyBans(const SampleRowArgs& row, int64_t vocab,
                             float* logits) {
  for (int32_t i = 0; i < row.num_banned; ++i) {
    const int32_t id = row.banned_ids[i];
    if (IsMine<n>(id, vocab)) logits[id] = Lowest();
  }
}

// Sets the logits of ids that the mask excludes to -infinity, and returns the
// largest of the other logits. Each thread does this for the ids that belong to
// it.
template <int n>
KVASIR_DEVICE BestLogit BestAllowed(const SampleRowArgs& row, int32_t vocab,
                                    float* logits) {
  const uint32_t* const mask = row.allow_mask;
  BestLogit best;
  ForLogits<n, 8>(logits, vocab, [&](int32_t id, float logit) {
    if (IsAllowed(mask, id)) {
      best.Add(id, logit);
    } else {
      simt::StoreGlobal(logits + id, Lowest());
    }
  });
  return best;
}

// Returns the counts of the n ids of a pack; zeros if `counts` is null.
template <int n>
KVASIR_DEVICE simt::Pack<int32_t, n> CountsOf(const int32_t* counts,
                                              int32_t pack) {
  simt::Pack<int32_t, n> pack_counts = {};
  if (counts == nullptr) return pack_counts;
  counts += n * pack;
  if (reinterpret_cast<uintptr_t>(counts) % sizeof(pack_counts) == 0) {
    return simt::LoadGlobal(
        reinterpret_cast<const simt::Pack<int32_t, n>*>(counts));
  }
  KVASIR_UNROLL
  for (int k = 0; k < n; ++k) {
    pack_counts.number[k] = simt::LoadGlobal(counts + k);
  }
  return pack_counts;
}

// Applies penalties, biases, bans and the mask to the row's logits, and writes
// the results to `logits` (scratch). Adds 0 times each raw logit to *rest, so
// *rest becomes NaN if a raw logit is infinite or NaN.
template <int n>
KVASIR_DEVICE BestLogit Adjust(const SampleRowArgs& row, const float* raw,
                               int32_t vocab, float* logits, float* rest) {
  const float repeated = row.repetition_penalty;
  const float present = row.presence_penalty;
  const float frequent = row.frequency_penalty;
  const int32_t* const prompt_counts = row.prompt_counts;
  const int32_t* const output_counts = row.output_counts;
  const uint32_t* const mask = row.allow_mask;
  const bool repetition = repeated != 1.0f && (prompt_counts != nullptr ||
                                               output_counts != nullptr);
  const bool output =
      output_counts != nullptr && (present != 0.0f || frequent != 0.0f);
  // If there are biases or bans, they are applied id by id after the loop, and
  // then the mask. If there are none, the loop applies the mask.
  const bool single = row.num_biases > 0 || row.num_banned > 0;
  using Logits = simt::Pack<float, n>;
  constexpr int kAhead = 2;
  const auto* const from = reinterpret_cast<const Logits*>(raw);
  auto* const to = reinterpret_cast<Logits*>(logits);
  const int32_t packs = vocab / n;
  BestLogit best;
  KVASIR_NO_UNROLL
  for (auto first = static_cast<int32_t>(simt::Thread()); first < packs;
       first += kAhead * kThreads) {
    Logits read[kAhead];
    simt::Pack<int32_t, n> in_output[kAhead] = {}, in_prompt[kAhead] = {};
    KVASIR_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int32_t pack = first + i * kThreads;
      if (pack >= packs) continue;
      read[i] = simt::LoadGlobal(from + pack);
      if (repetition) in_prompt[i] = CountsOf<n>(prompt_counts, pack);
      if (repetition || output) {
        in_output[i] = CountsOf<n>(output_counts, pack);
      }
    }
    KVASIR_UNROLL
    for (int i = 0; i < kAhead; ++i) {
      const int32_t pack = first + i * kThreads;
      if (pack >= packs) continue;
      KVASIR_UNROLL
      for (int k = 0; k < n; ++k) {
        float logit = read[i].number[k];
        *rest = simt::Fma(logit, 0.0f, *rest);
        const int32_t count = in_output[i].number[k];
        if (repetition && (in_prompt[i].number[k] > 0 || count > 0)) {
          logit = logit > 0.0f ? logit / repeated : logit * repeated;
        }
        if (output && count > 0) {
          logit = logit - frequent * static_cast<float>(count);
          logit = logit - present;
        }
        const int32_t id = n * pack + k;
        if (!single && !IsAllowed(mask, id)) logit = Lowest();
        best.Add(id, logit);
        read[i].number[k] = logit;
      }
      simt::StoreGlobal(to + pack, read[i]);
    }
  }
  if (!single) return best;
  for (int32_t i = 0; i < row.num_biases; ++i) {
    const int32_t id = row.bias_ids[i];
    if (IsMine<n>(id, vocab)) logits[id] = logits[id] + row.biases[i];
  }
  ApplyBans<n>(row, vocab, logits);
  return BestAllowed<n>(row, vocab, logits);
}

// Returns a random number in [0, 1): base::Philox4x32 with the row's seed as
// the key, and its position and sample index as the counter.
KVASIR_DEVICE double Uniform(const SampleRowArgs& row) {
  auto key0 = static_cast<uint32_t>(row.seed);
  auto key1 = static_cast<uint32_t>(row.seed >> 32);
  auto c0 = static_cast<uint32_t>(row.position);
  auto c1 = static_cast<uint32_t>(row.position >> 32);
  uint32_t c2 = row.sample_index;
  uint32_t c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
    key0 += 0x9E3779B9;
    key1 += 0xBB67AE85;
  }
  const uint64_t word = uint64_t{c1} << 32 | c0;
  return static_cast<double>(word >> 11) * 0x1p-53;
}

// The range of the ids that are sorted in shared memory: those after the prefix
// `from` and before the key `end`.
struct SortedIds {
  Prefix from;
  TopKey end;
};

// Returns the shortest prefix, of at least one id, that meets `goal`. If none
// does, returns the prefix `to`. `keys` and `weights` have the sorted ids after
// the prefix `from`. Runs on one thread and adds weights in the order of a CPU.
KVASIR_DEVICE Found Walk(const Goal& goal, const Prefix& from, const Prefix& to,
                         const TopKey* keys, const float* weights) {
  constexpr uint32_t kTogether = 8;
  const uint32_t all = to.count - from.count;
  const uint32_t count = all < kSortedIds ? all : kSortedIds;
  if (from.count > 0 && keys[0] >= goal.end) return {from, -1};
  double mass = from.mass;
  uint32_t i = 0;
  // Adds eight weights at a time, as long as they do not reach the goal.
  KVASIR_NO_UNROLL
  for (; i + kTogether < count; i += kTogether) {
    double next = mass;
    KVASIR_UNROLL
    for (uint32_t k = 0; k < kTogether; ++k) {
      next += static_cast<double>(weights[i + k]);
    }
    if (goal.Has({keys[i + kTogether], next, from.count + i + kTogether})) {
      break;
    }
    mass = next;
  }
  Found found = {from, -1};
  KVASIR_NO_UNROLL
  for (; i < count; ++i) {
    mass += static_cast<double>(weights[i]);
    found = {{i + 1 < count ? keys[i + 1] : to.end, mass, from.count + i + 1},
             IdOf(keys[i])};
    if (goal.Has(found.prefix)) break;
  }
  return found;
}

// Finds the shortest prefix within `limit` that meets the goal of a stage.
template <int n>
KVASIR_DEVICE Found Find(const TopOrder& order, const Goal& goal,
                         const Prefix& limit, int stage, SortedIds* sorted,
                         SampleShared* shared) {
  TopInterval interval = Narrow<n>(order, goal, limit, kSortedIds,
                                   /*whole=*/false, &shared->drawn);
  // If the whole prefix interval.to fits into shared memory, Walk begins at the
  // top of the row. Then its sums have the same bits as on a CPU.
  if (interval.to.count <= kSortedIds) interval.from = {order.begin(), 0.0, 0};
  if (interval.from.end < sorted->from.end || interval.to.end > sorted->end) {
    *sorted = {interval.from, interval.to.end};
    const uint32_t count =
        TakeSorted<n>(order, interval.from.end, interval.to.end, shared->keys,
                      kSortedIds, &shared->next[stage]);
    for (uint32_t i = simt::Thread(); i < count; i += kLogitThreads) {
      shared->weights[i] = order.Weight(LogitOf(shared->keys[i]));
    }
    simt::SyncCta();
  }
  if (simt::Thread() == 0) {
    shared->found[stage] =
        Walk(goal, sorted->from, interval.to, shared->keys, shared->weights);
  }
  simt::SyncCta();
  return shared->found[stage];
}

template <int n>
KVASIR_DEVICE int32_t Draw(const SampleRowArgs& row, const TopOrder& order,
                           SampleShared* shared) {
  Split<n>(order, {order.begin(), 0.0, 0}, CutsOfRow(order),
           &shared->drawn.split, &shared->drawn.row);
  const Prefix all = shared->drawn.row.prefix[kCuts - 1];
  // The key of the first id that min-p excludes.
  TopKey below = kEndOfRow;
  if (const float min_p = row.min_p; min_p > 0.0f) {
    ForLogits<n, 4>(order.logits, order.vocab, [&](int32_t id, float logit) {
      const TopKey key = KeyOf(logit, id);
      if (key >= below) return;
      const float weight = order.Weight(logit);
      if (weight > 0.0f && weight < min_p) below = key;
    });
    below = FirstKey(below, shared->below);
  }
  SortedIds sorted = {{kEndOfRow, 0.0, 0}, 0};
  Found found = {all, -1};
  KVASIR_NO_UNROLL
  for (int stage = 0; stage < kStages; ++stage) {
    Goal goal;
    if (stage == kTopK) {
      if (row.top_k <= 0 || static_cast<uint32_t>(row.top_k) >= all.count) {
        continue;
      }
      goal.count = static_cast<uint32_t>(row.top_k);
    } else if (stage == kTopP) {
      if (row.top_p >= 1.0f) continue;
      goal.mass = static_cast<double>(row.top_p) * found.prefix.mass;
    } else if (stage == kMinP) {
      if (below >= found.prefix.end) continue;
      goal.end = below;
    } else {
      goal.mass = Uniform(row) * found.prefix.mass;
      goal.above = true;
    }
    found = Find<n>(order, goal, found.prefix, stage, &sorted, shared);
  }
  return found.last;
}

// Samples an id and returns it to all threads.
template <int n>
KVASIR_DEVICE int32_t Choose(const SampleRowArgs& row, int32_t vocab,
                             TopKey best, const float* logits, float* scratch,
                             SampleShared* shared) {
  if (best == kEndOfRow) {
    // If no logit is above -infinity, all allowed ids are equally likely.
    for (auto pack = int32_t(simt::Thread()); pack < vocab / n;
         pack += kThreads) {
      simt::StoreGlobal(reinterpret_cast<simt::Pack<float, n>*>(scratch) + pack,
                        {});
    }
    ApplyBans<n>(row, vocab, scratch);
    best = FirstKey(BestAllowed<n>(row, vocab, scratch).key(), shared->best[1]);
    return best == kEndOfRow ? kNoTokenAllowed : IdOf(best);
  }
  const float max = LogitOf(best);
  // If the largest logit is infinite, weights would be computed from infinity -
  // infinity, which is NaN. So the id is taken without a draw.
  if (row.temperature <= 0.0f || !IsFinite(max)) return IdOf(best);
  return Draw<n>(row, {logits, vocab, max, row.temperature, true}, shared);
}

// Writes the log probabilities of the sampled id and of the top ids. `keys` is
// scratch for a list of more than kSortedIds ids.
template <int n>
KVASIR_DEVICE void WriteLogprobs(const SampleArgs& args, int32_t token,
                                 TopKey* keys, SampleShared* shared) {
  const int64_t index = simt::CtaX();
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t num_logprobs = args.rows[index].num_logprobs;
  // If a raw logit is infinite or NaN, no log probabilities are reported.
  const bool sound = token != kLogitNotFinite;
  const int64_t want = sound && num_logprobs > 0 ? num_logprobs : 0;
  for (int64_t i = want + thread; i < args.max_top; i += kThreads) {
    args.top_ids[index * args.max_top + i] = -1;
    args.top_logprobs[index * args.max_top + i] = 0.0f;
  }
  if (!sound || num_logprobs < 0) {
    if (thread == 0) args.logprobs[index] = 0.0f;
    return;
  }
  const float* const logits = args.logits + index * args.row_stride;
  LogSoftmaxState state = {Lowest(), 0.0f, Lowest()};
  AddLogits<n>(logits, args.vocab, reinterpret_cast<LogitBlock*>(shared + 1),
               &state);
  if (thread == 0) {
    shared->state = state;
    args.logprobs[index] =
        token >= 0 ? LogProbabilityOf(simt::LoadGlobal(logits + token), state)
                   : 0.0f;
  }
  const int64_t listed = want < args.max_top ? want : args.max_top;
  if (listed == 0) return;
  simt::SyncCta();
  state = shared->state;
  const TopOrder order = {logits, static_cast<int32_t>(args.vocab), state.max,
                          1.0f, false};
  Goal goal;
  goal.count = static_cast<uint32_t>(listed);
  TopMemory* const memory = &shared->listed;
  Split<n>(order, {order.begin(), 0.0, 0}, CutsOfRow(order), &memory->split,
           &memory->row);
  if (goal.count <= kSortedIds) keys = shared->keys;
  const uint32_t most = goal.count <= kSortedIds ? kSortedIds : goal.count;
  const TopInterval top = Narrow<n>(order, goal, memory->row.prefix[kCuts - 1],
                                    most, /*whole=*/true, memory);
  (void)TakeSorted<n>(order, order.begin(), top.to.end, keys, most,
                      &memory->next);
  for (int64_t i = thread; i < listed; i += kThreads) {
    args.top_ids[index * args.max_top + i] = IdOf(keys[i]);
    args.top_logprobs[index * args.max_top + i] =
        LogProbabilityOf(LogitOf(keys[i]), state);
  }
}

template <int n>
KVASIR_KERNEL(kLogitThreads)
SampleKernel(SampleCall call) {
  const SampleArgs& args = call.args;
  auto* const shared = reinterpret_cast<SampleShared*>(simt::Shared());
  const int64_t index = simt::CtaX();
  // a reference instead of a copy, to use fewer registers
  const SampleRowArgs& row = args.rows[index];
  const auto vocab = static_cast<int32_t>(args.vocab);
  const float* const raw = args.logits + index * args.row_stride;
  char* const scratch = call.scratch + index * call.row_bytes;
  auto* const keys = reinterpret_cast<TopKey*>(scratch);
  auto* const adjusted =
      reinterpret_cast<float*>(scratch + call.row_bytes - call.logits_bytes);

  const bool decides = simt::Thread() == 0;
  if (decides) {
    for (uint32_t& next : shared->next) next = 0;
    shared->listed.next = 0;
  }
  const bool adjusts =
      (row.repetition_penalty != 1.0f && row.prompt_counts != nullptr) ||
      (row.output_counts != nullptr &&
       (row.repetition_penalty != 1.0f || row.presence_penalty != 0.0f ||
        row.frequency_penalty != 0.0f)) ||
      row.num_biases > 0 || row.num_banned > 0 || row.allow_mask != nullptr;
  BestLogit best;
  float rest = 0.0f;  // becomes NaN if a raw logit is not finite
  if (adjusts) {
    best = Adjust<n>(row, raw, vocab, adjusted, &rest);
  } else {
    ForLogits<n, 16>(raw, vocab, [&](int32_t id, float logit) {
      rest = simt::Fma(logit, 0.0f, rest);
      best.Add(id, logit);
    });
  }
  // smaller than the key of any finite logit
  constexpr TopKey kNotFinite = 0;
  const TopKey first =
      FirstKey(rest == 0.0f ? best.key() : kNotFinite, shared->best[0]);
  const int32_t token =
      first == kNotFinite
          ? kLogitNotFinite
          : Choose<n>(row, vocab, first, adjusts ? adjusted : raw, adjusted,
                      shared);
  if (decides) args.token_ids[index] = token;
  WriteLogprobs<n>(args, token, keys, shared);
  if (decides && token >= 0 && row.output_counts != nullptr) {
    ++row.output_counts[token];
  }
}

KVASIR_KERNEL(kLogitThreads)
CountTokensKernel(CountTokensArgs args) {
  const TokenHistoryArgs row = args.rows[simt::CtaX()];
  if (row.clear) {
    for (int64_t id = simt::Thread(); id < args.vocab; id += kThreads) {
      simt::StoreGlobal(row.counts + id, 0);
    }
    simt::SyncCta();
  }
  for (int64_t i = simt::Thread(); i < row.num_ids; i += kThreads) {
    const int64_t id = simt::LoadGlobal(row.ids + i);
    if (id < 0 || id >= args.vocab) continue;
    simt::AtomicAdd<simt::Scope::kCta>(
        reinterpret_cast<uint32_t*>(row.counts + id), 1u);
  }
}

}  // namespace

void SampleCuda(const SampleArgs& args, void* scratch, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "sample";
  launch.grid_x = simt::Ctas(args.num_rows);
  launch.threads = kLogitThreads;
  launch.shared_bytes = static_cast<uint32_t>(sizeof(SampleShared)) +
                        LogitBlocksBytes(args.vocab);
  simt::Launch(
      launcher, launch,
      HasWideRows(args, args.vocab) ? SampleKernel<4> : SampleKernel<1>,
      {args, static_cast<char*>(scratch),
       SampleDeviceRowBytes(args.vocab, args.max_top),
       SampleDeviceRowBytes(args.vocab, 0)});
}

void CountTokensCuda(const CountTokensArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "count_tokens";
  launch.grid_x = simt::Ctas(args.num_rows);
  launch.threads = kLogitThreads;
  simt::Launch(launcher, launch, CountTokensKernel, args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
