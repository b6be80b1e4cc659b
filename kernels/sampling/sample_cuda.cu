// sample and count_tokens on a GPU: one CTA to a row.
//
// A row's ids belong to threads (id % threads), so that penalties, biases, bans
// and the mask need no barrier. Greedy rows end with the largest of the
// adjusted logits. Others take what can be drawn at all from the top: one pass
// sums weights and counts ids down to eight distances from the largest logit,
// the nearest of them below which nothing is wanted says what is sorted (in
// shared memory up to 2048 ids, else in scratch), and one thread walks down the
// order with the CPU's arithmetic. The list of the most likely ids is found in
// the same way.
//
// The result is the CPU's: greedy choices and ties, filters, log probabilities
// and lists to the bit; but for this: where top-k is off, the sum of all
// weights, which top-p and the draw are shares of, is added in another order,
// in float64. A draw within 1e-15 of a border between two ids may fall to the
// other. And see LogProbabilityOf.
//
// Layout: float32 logits, rows row_stride apart; scratch of a row: V keys of 8
// bytes, V adjusted logits. Bytes of a row: greedy 12 V (of 4 V logits, written
// and read once as adjusted ones), more 8 V with a draw, 8 V with log
// probabilities; from the second-level cache but for the first 4 V. Operations:
// about 50 to a logit with a draw; a flat row sorts as many ids as it has
// (n log2(n)^2 / 4 exchanges, about a millisecond for 128K). Floor: what one
// multiprocessor reads; 128K ids are 0.5 MB.
#include "kernels/sampling/logits_cuda.h"
#include "kernels/sampling/sample_row.h"
#include "kernels/simt/launch.h"
#include "kernels/simt/op_table.h"

namespace kvasir::kernels::KVASIR_SIMT_TARGET {
namespace {

constexpr int32_t kThreads = int32_t{kLogitThreads};
// Ids that are sorted in shared memory.
constexpr uint32_t kSharedKeys = 2048;
// Distances from the largest logit, over the temperature: 0.5, 1.5, 3, ... 18.
constexpr int kCuts = 8;
KVASIR_DEVICE float CutAt(int i) {
  return 0.25f * static_cast<float>((i + 1) * (i + 2));
}
// How much more than what is wanted is taken, for sums in float32.
constexpr float kSlack = 1.0001f;

struct SampleCall {
  SampleArgs args;
  char* scratch;
  int64_t row_bytes;  // of it
};

// What a warp has found of one KeepTop.
struct TopSums {
  double total;
  float mass[kCuts];
  uint32_t count[kCuts];
  uint32_t all;
};
// Of a KeepTop and of a search, each call's own.
struct TopMemory {
  TopSums sums[kLogitWarps];
  uint32_t next;  // place for a key
};
struct SampleShared {
  uint64_t keys[kSharedKeys];
  uint64_t best[2][kLogitWarps];
  TopMemory drawn, listed;
  LogSoftmaxState state;
};
static_assert(sizeof(SampleShared) % alignof(LogitBlock) == 0, "blocks follow");

template <typename T>
KVASIR_DEVICE T ShuffleWide(T value, uint32_t lanes) {
  const auto bits = simt::BitsAs<uint64_t>(value);
  const uint64_t low = simt::ShuffleXor(static_cast<uint32_t>(bits), lanes);
  const uint64_t high =
      simt::ShuffleXor(static_cast<uint32_t>(bits >> 32), lanes);
  return simt::BitsAs<T>(high << 32 | low);
}

// Larger for larger numbers; -0 is 0. Above 0 for numbers that are none.
KVASIR_DEVICE uint32_t OrderOf(float x) {
  const auto bits = simt::BitsAs<uint32_t>(x + 0.0f);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
KVASIR_DEVICE float OfOrder(uint32_t order) {
  return simt::BitsAs<float>(order ^
                             ((order >> 31) != 0 ? 0x80000000u : 0xffffffffu));
}

KVASIR_DEVICE bool IsFinite(float x) { return x * 0.0f == 0.0f; }

// The largest of all threads' keys.
KVASIR_DEVICE uint64_t LargestKey(uint64_t key, uint64_t* partial) {
  for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
    const uint64_t other = ShuffleWide(key, lanes);
    key = other > key ? other : key;
  }
  if (simt::Lane() == 0) simt::StoreShared(partial + simt::Warp(), key);
  simt::SyncCta();
  for (uint32_t warp = 0; warp < kLogitWarps; ++warp) {
    const uint64_t other = simt::LoadShared(partial + warp);
    key = other > key ? other : key;
  }
  return key;
}

// Of `logits` in scratch, of the thread's ids: what must not be sampled.
KVASIR_DEVICE void ApplyBans(const SampleRowArgs& row, int64_t vocab,
                             float* logits) {
  for (int32_t i = 0; i < row.num_banned; ++i) {
    const int32_t id = row.banned_ids[i];
    if (id >= 0 && id < vocab && id % kThreads == int32_t(simt::Thread())) {
      logits[id] = Lowest();
    }
  }
}

// The largest of the thread's logits and its id, the lower of equals; 0 where
// none is above -infinity. Logits of ids that the mask leaves out become that.
KVASIR_DEVICE uint64_t BestOf(const SampleRowArgs& row, int32_t vocab,
                              float* logits) {
  uint64_t best = 0;
  for (auto id = int32_t(simt::Thread()); id < vocab; id += kThreads) {
    if (row.allow_mask != nullptr &&
        (row.allow_mask[id / 32] >> (id % 32) & 1u) == 0) {
      simt::StoreGlobal(logits + id, Lowest());
      continue;
    }
    const float logit = simt::LoadGlobal(logits + id);
    if (!(logit > Lowest())) continue;
    const uint64_t key = uint64_t{OrderOf(logit)} << 32 |
                         (0xffffffffu - static_cast<uint32_t>(id));
    best = key > best ? key : best;
  }
  return best;
}

// Puts the row's logits into scratch, with penalties, biases and bans. Whether
// the thread's raw ones are finite.
KVASIR_DEVICE bool Adjust(const SampleRowArgs& row, const float* raw,
                          int32_t vocab, float* logits) {
  const bool repetition =
      row.repetition_penalty != 1.0f &&
      (row.prompt_counts != nullptr || row.output_counts != nullptr);
  const bool output =
      row.output_counts != nullptr &&
      (row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f);
  const auto thread = static_cast<int32_t>(simt::Thread());
  bool finite = true;
  for (int32_t id = thread; id < vocab; id += kThreads) {
    float logit = simt::LoadGlobal(raw + id);
    finite = finite && IsFinite(logit);
    if (repetition || output) {
      const int32_t in_output =
          row.output_counts != nullptr ? row.output_counts[id] : 0;
      const bool in_prompt =
          row.prompt_counts != nullptr && row.prompt_counts[id] > 0;
      if (repetition && (in_prompt || in_output > 0)) {
        logit = logit > 0.0f ? logit / row.repetition_penalty
                             : logit * row.repetition_penalty;
      }
      if (output && in_output > 0) {
        logit = logit - row.frequency_penalty * static_cast<float>(in_output);
        logit = logit - row.presence_penalty;
      }
    }
    simt::StoreGlobal(logits + id, logit);
  }
  for (int32_t i = 0; i < row.num_biases; ++i) {
    const int32_t id = row.bias_ids[i];
    if (id >= 0 && id < vocab && id % kThreads == thread) {
      logits[id] = logits[id] + row.biases[i];
    }
  }
  ApplyBans(row, vocab, logits);
  return finite;
}

// Puts keys in ascending order: a network whose exchanges all go upwards, so
// that it may end anywhere.
KVASIR_DEVICE void Sort(uint64_t* keys, uint32_t count) {
  uint32_t whole = 1;
  while (whole < count) whole *= 2;
  for (uint32_t size = 2; size <= whole; size *= 2) {
    for (uint32_t apart = size / 2; apart > 0; apart /= 2) {
      // First mirror images, then neighbours.
      const uint32_t flip = apart == size / 2 ? 2 * apart - 1 : apart;
      for (uint32_t i = simt::Thread(); i < whole / 2; i += kLogitThreads) {
        const uint32_t low = i / apart * 2 * apart + i % apart;
        const uint32_t high = low ^ flip;
        if (high >= count) continue;
        const uint64_t a = keys[low];
        const uint64_t b = keys[high];
        if (a > b) {
          keys[low] = b;
          keys[high] = a;
        }
      }
      simt::SyncCta();
    }
  }
}

// Ids from the top, in the order of their logits, equal ones by id.
struct TopIds {
  uint64_t* keys;  // ~OrderOf(logit) above, the id below
  uint32_t count;
  uint32_t all;  // that there are, with those which were left away
  double total;  // of all weights
};

// What a row's logits are taken from the top by.
struct TopOrder {
  const float* logits;
  int32_t vocab;
  float max;
  float temperature;
  bool drawable;  // only ids whose weight, exp((logit - max) / temperature), is
                  // above 0

  // Calls visit(id, logit, (logit - max) / temperature, weight).
  template <typename Visit>
  KVASIR_DEVICE void ForIds(const Visit& visit) const {
    for (auto id = int32_t(simt::Thread()); id < vocab; id += kThreads) {
      const float logit = simt::LoadGlobal(logits + id);
      const float distance = (logit - max) / temperature;
      const float weight = Exp(distance);
      if (!drawable || weight > 0.0f) visit(id, logit, distance, weight);
    }
  }
};

// What all threads found.
KVASIR_DEVICE TopSums SumOf(TopSums mine, TopSums* sums) {
  for (uint32_t lanes = simt::kWarp / 2; lanes > 0; lanes /= 2) {
    mine.total += ShuffleWide(mine.total, lanes);
    mine.all += simt::ShuffleXor(mine.all, lanes);
    KVASIR_UNROLL
    for (int i = 0; i < kCuts; ++i) {
      mine.mass[i] += simt::ShuffleXor(mine.mass[i], lanes);
      mine.count[i] += simt::ShuffleXor(mine.count[i], lanes);
    }
  }
  if (simt::Lane() == 0) sums[simt::Warp()] = mine;
  simt::SyncCta();
  TopSums sum = {};
  for (uint32_t warp = 0; warp < kLogitWarps; ++warp) {
    sum.total += sums[warp].total;
    sum.all += sums[warp].all;
    KVASIR_UNROLL
    for (int i = 0; i < kCuts; ++i) {
      sum.mass[i] += sums[warp].mass[i];
      sum.count[i] += sums[warp].count[i];
    }
  }
  return sum;
}

// Ids down to the first distance that is enough(count, mass, distance, total of
// all weights): all where none is. `shared` and `scratch` are for keys.
template <typename Enough>
KVASIR_DEVICE TopIds KeepTop(const TopOrder& order, uint64_t* shared,
                             uint64_t* scratch, TopMemory* memory,
                             const Enough& enough) {
  TopSums mine = {};
  order.ForIds([&](int32_t, float, float distance, float weight) {
    mine.total += static_cast<double>(weight);
    ++mine.all;
    KVASIR_UNROLL
    for (int i = 0; i < kCuts; ++i) {
      if (distance > -CutAt(i)) {
        mine.mass[i] += weight;
        ++mine.count[i];
      }
    }
  });
  const TopSums sum = SumOf(mine, memory->sums);
  uint32_t count = sum.all;
  bool cuts = false;
  float cut = 0.0f;
  KVASIR_UNROLL
  for (int i = kCuts - 1; i >= 0; --i) {
    if (enough(sum.count[i], sum.mass[i], CutAt(i), sum.total)) {
      cuts = true;
      cut = CutAt(i);
      count = sum.count[i];
    }
  }
  uint64_t* const keys = count <= kSharedKeys ? shared : scratch;
  order.ForIds([&](int32_t id, float logit, float distance, float) {
    if (cuts && !(distance > -cut)) return;
    const uint32_t place =
        simt::AtomicAdd<simt::Scope::kCta>(&memory->next, 1u);
    keys[place] = uint64_t{~OrderOf(logit)} << 32 | static_cast<uint32_t>(id);
  });
  simt::SyncCta();
  const TopIds top = {keys, simt::LoadShared(&memory->next), sum.all,
                      sum.total};
  Sort(top.keys, top.count);
  return top;
}

// base::Philox4x32 of the row's seed at its position and sample index, as a
// number in [0, 1).
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

// Walks down ids with their weights (float32 above, the id below) as sample.h
// says; by one thread.
KVASIR_DEVICE int32_t Walk(const SampleRowArgs& row, const TopIds& top,
                           double uniform) {
  const auto weight_of = [&](int64_t i) {
    return static_cast<double>(
        simt::BitsAs<float>(static_cast<uint32_t>(top.keys[i] >> 32)));
  };
  int64_t limit = top.count;
  double kept = top.total;
  if (row.top_k > 0 && static_cast<uint32_t>(row.top_k) < top.all) {
    limit = row.top_k;
    kept = 0.0;
    for (int64_t i = 0; i < limit; ++i) kept += weight_of(i);
  }
  if (row.top_p < 1.0f) {
    const double wanted = static_cast<double>(row.top_p) * kept;
    int64_t prefix = 0;
    kept = 0.0;
    while (prefix < limit && (prefix == 0 || kept < wanted)) {
      kept += weight_of(prefix++);
    }
    limit = prefix;
  }
  if (row.min_p > 0.0f) {
    int64_t prefix = 0;
    kept = 0.0;
    while (
        prefix < limit &&
        (prefix == 0 || weight_of(prefix) >= static_cast<double>(row.min_p))) {
      kept += weight_of(prefix++);
    }
    limit = prefix;
  }
  const double target = uniform * kept;
  double sum = 0.0;
  int64_t i = 0;
  for (; i < limit - 1; ++i) {
    sum += weight_of(i);
    if (sum > target) break;
  }
  return static_cast<int32_t>(static_cast<uint32_t>(top.keys[i]));
}

// Thread 0's result.
KVASIR_DEVICE int32_t Draw(const SampleRowArgs& row, const TopOrder& order,
                           uint64_t* scratch, SampleShared* shared) {
  const double uniform = Uniform(row);
  const auto enough = [&](uint32_t count, float mass, float cut, double total) {
    if (row.top_k > 0) return count >= static_cast<uint32_t>(row.top_k);
    if (row.top_p >= 1.0f && row.min_p > 0.0f) {
      return Exp(-cut) * kSlack < row.min_p;
    }
    const double share =
        row.top_p < 1.0f ? static_cast<double>(row.top_p) : uniform;
    return static_cast<double>(mass) >=
           share * total * static_cast<double>(kSlack);
  };
  const TopIds top =
      KeepTop(order, shared->keys, scratch, &shared->drawn, enough);
  for (uint32_t i = simt::Thread(); i < top.count; i += kLogitThreads) {
    const uint64_t key = top.keys[i];
    const float logit = OfOrder(~static_cast<uint32_t>(key >> 32));
    const float weight = Exp((logit - order.max) / order.temperature);
    top.keys[i] = uint64_t{simt::BitsAs<uint32_t>(weight)} << 32 |
                  static_cast<uint32_t>(key);
  }
  simt::SyncCta();
  return simt::Thread() == 0 ? Walk(row, top, uniform) : 0;
}

// Thread 0's result.
KVASIR_DEVICE int32_t Choose(const SampleRowArgs& row, int32_t vocab,
                             uint64_t best, float* logits, uint64_t* scratch,
                             SampleShared* shared) {
  const auto id_of = [](uint64_t key) {
    return static_cast<int32_t>(~static_cast<uint32_t>(key));
  };
  if (best == 0) {
    // No logit is above -infinity: all that may be sampled are equal.
    for (auto id = int32_t(simt::Thread()); id < vocab; id += kThreads) {
      simt::StoreGlobal(logits + id, 0.0f);
    }
    ApplyBans(row, vocab, logits);
    best = LargestKey(BestOf(row, vocab, logits), shared->best[1]);
    return best == 0 ? kNoTokenAllowed : id_of(best);
  }
  const float max = OfOrder(static_cast<uint32_t>(best >> 32));
  // The difference to an infinite logit is no number.
  if (row.temperature <= 0.0f || !IsFinite(max)) return id_of(best);
  return Draw(row, {logits, vocab, max, row.temperature, true}, scratch,
              shared);
}

// `token` is thread 0's.
KVASIR_DEVICE void WriteLogprobs(const SampleArgs& args, int32_t token,
                                 bool sound, uint64_t* scratch,
                                 SampleShared* shared) {
  const int64_t index = simt::CtaX();
  const auto thread = static_cast<int32_t>(simt::Thread());
  const int32_t num_logprobs = args.rows[index].num_logprobs;
  // Of numbers that have no order there is nothing to report.
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
  AddLogits(logits, args.vocab, reinterpret_cast<LogitBlock*>(shared + 1),
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
  const TopIds top = KeepTop(
      {logits, static_cast<int32_t>(args.vocab), state.max, 1.0f, false},
      shared->keys, scratch, &shared->listed,
      [&](uint32_t count, float, float, double) { return count >= listed; });
  for (int64_t i = thread; i < listed; i += kThreads) {
    const uint64_t key = top.keys[i];
    const float logit = OfOrder(~static_cast<uint32_t>(key >> 32));
    args.top_ids[index * args.max_top + i] =
        static_cast<int32_t>(static_cast<uint32_t>(key));
    args.top_logprobs[index * args.max_top + i] =
        LogProbabilityOf(logit, state);
  }
}

KVASIR_KERNEL(kLogitThreads)
SampleKernel(SampleCall call) {
  const SampleArgs& args = call.args;
  auto* const shared = reinterpret_cast<SampleShared*>(simt::Shared());
  const int64_t index = simt::CtaX();
  const SampleRowArgs row = args.rows[index];
  const auto vocab = static_cast<int32_t>(args.vocab);
  auto* const scratch =
      reinterpret_cast<uint64_t*>(call.scratch + index * call.row_bytes);
  auto* const logits = reinterpret_cast<float*>(scratch + vocab);

  const bool decides = simt::Thread() == 0;
  if (decides) {
    shared->drawn.next = 0;
    shared->listed.next = 0;
  }
  constexpr uint64_t kNotFinite = ~uint64_t{0};  // above every key
  const bool finite =
      Adjust(row, args.logits + index * args.row_stride, vocab, logits);
  const uint64_t best = LargestKey(
      finite ? BestOf(row, vocab, logits) : kNotFinite, shared->best[0]);
  const bool sound = best != kNotFinite;
  const int32_t token = sound
                            ? Choose(row, vocab, best, logits, scratch, shared)
                            : kLogitNotFinite;
  if (decides) args.token_ids[index] = token;
  WriteLogprobs(args, token, sound, scratch, shared);
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
  launch.grid_x = static_cast<uint32_t>(args.num_rows);
  launch.threads = kLogitThreads;
  launch.shared_bytes = static_cast<uint32_t>(sizeof(SampleShared)) +
                        LogitBlocksBytes(args.vocab);
  simt::Launch(
      launcher, launch, SampleKernel,
      {args, static_cast<char*>(scratch), SampleScratch::Bytes(args.vocab)});
}

void CountTokensCuda(const CountTokensArgs& args, Launcher& launcher) {
  KernelLaunch launch;
  launch.name = "count_tokens";
  launch.grid_x = static_cast<uint32_t>(args.num_rows);
  launch.threads = kLogitThreads;
  simt::Launch(launcher, launch, CountTokensKernel, args);
}

}  // namespace kvasir::kernels::KVASIR_SIMT_TARGET
