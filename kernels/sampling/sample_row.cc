#include "kernels/sampling/sample_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/philox.h"

namespace kvasir::kernels {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

void ApplyPenalties(const SampleRowArgs& row, int64_t vocab, float* logits) {
  const bool repetition = row.repetition_penalty != 1.0f &&
                          (row.prompt_counts || row.output_counts);
  const bool output =
      row.output_counts != nullptr &&
      (row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f);
  if (!repetition && !output) return;
  for (int64_t id = 0; id < vocab; ++id) {
    const int32_t in_output = row.output_counts ? row.output_counts[id] : 0;
    const bool in_prompt = row.prompt_counts && row.prompt_counts[id] > 0;
    float logit = logits[id];
    if (repetition && (in_prompt || in_output > 0)) {
      logit = logit > 0.0f ? logit / row.repetition_penalty
                           : logit * row.repetition_penalty;
    }
    if (output && in_output > 0) {
      logit = logit - row.frequency_penalty * static_cast<float>(in_output);
      logit = logit - row.presence_penalty;
    }
    logits[id] = logit;
  }
}

void ApplyBiases(const SampleRowArgs& row, int64_t vocab, float* logits) {
  for (int32_t i = 0; i < row.num_biases; ++i) {
    const int64_t id = row.bias_ids[i];
    if (id >= 0 && id < vocab) logits[id] = logits[id] + row.biases[i];
  }
}

void ApplyBans(const SampleRowArgs& row, int64_t vocab, float* logits) {
  for (int32_t i = 0; i < row.num_banned; ++i) {
    const int64_t id = row.banned_ids[i];
    if (id >= 0 && id < vocab) logits[id] = kLowest;
  }
  if (row.allow_mask == nullptr) return;
  for (int64_t id = 0; id < vocab; ++id) {
    if ((row.allow_mask[id / 32] >> (id % 32) & 1u) == 0) logits[id] = kLowest;
  }
}

// Returns ids in descending order of their keys; ids with equal keys are
// ordered by id. Sorts only as many ids as are requested.
class Descending {
 public:
  // Makes a heap of the `count` ids in `ids`, in place.
  Descending(const float* keys, int32_t* ids, int64_t count)
      : keys_(keys), ids_(ids), left_(count), count_(count) {
    std::make_heap(ids_, ids_ + left_, Later{keys_});
  }

  bool empty() const { return left_ == 0; }
  int32_t Next() {
    std::pop_heap(ids_, ids_ + left_, Later{keys_});
    return ids_[--left_];
  }
  // Returns the id that call number i of Next (from 0) returned.
  int32_t Taken(int64_t i) const { return ids_[count_ - 1 - i]; }

 private:
  struct Later {
    const float* keys;
    bool operator()(int32_t a, int32_t b) const {
      return keys[a] < keys[b] || (keys[a] == keys[b] && a > b);
    }
  };

  const float* keys_;
  int32_t* ids_;
  int64_t left_;
  const int64_t count_;
};

double Uniform(const SampleRowArgs& row) {
  const base::PhiloxCounter bits =
      base::Philox4x32(base::PhiloxKeyFromSeed(row.seed),
                       base::PhiloxCounterOf(row.position, row.sample_index));
  const uint64_t word = (static_cast<uint64_t>(bits[1]) << 32) | bits[0];
  return static_cast<double>(word >> 11) * 0x1p-53;
}

// Draws one of the ids with a weight above 0. scratch.weights has exp((logit -
// max) / temperature), so the largest weight is 1. Returns kNoTokenAllowed if
// no weight is above 0.
int32_t Draw(const SampleRowArgs& row, int64_t vocab,
             const SampleScratch& scratch) {
  int64_t count = 0;
  double total = 0.0;
  for (int64_t id = 0; id < vocab; ++id) {
    if (scratch.weights[id] > 0.0f) {
      scratch.order[count++] = static_cast<int32_t>(id);
      total += static_cast<double>(scratch.weights[id]);
    }
  }
  if (count == 0) return kNoTokenAllowed;
  Descending order(scratch.logits, scratch.order, count);
  int64_t kept = 0;
  const auto weight_of = [&](int64_t i) {
    return static_cast<double>(scratch.weights[order.Taken(i)]);
  };

  int64_t limit = count;
  if (row.top_k > 0 && row.top_k < count) {
    limit = row.top_k;
    total = 0.0;
    for (; kept < limit; ++kept) {
      order.Next();
      total += weight_of(kept);
    }
  }
  double kept_total = total;
  if (row.top_p < 1.0f) {
    const double wanted = static_cast<double>(row.top_p) * total;
    int64_t prefix = 0;
    kept_total = 0.0;
    while (prefix < limit && (prefix == 0 || kept_total < wanted)) {
      if (prefix == kept) {
        order.Next();
        ++kept;
      }
      kept_total += weight_of(prefix++);
    }
    limit = prefix;
  }
  if (row.min_p > 0.0f) {
    int64_t prefix = 0;
    kept_total = 0.0;
    while (prefix < limit) {
      if (prefix == kept) {
        order.Next();
        ++kept;
      }
      // min_p is relative to the largest weight, which is 1.
      if (prefix > 0 && weight_of(prefix) < static_cast<double>(row.min_p)) {
        break;
      }
      kept_total += weight_of(prefix++);
    }
    limit = prefix;
  }

  const double target = Uniform(row) * kept_total;
  double sum = 0.0;
  for (int64_t i = 0; i < limit; ++i) {
    if (i == kept) {
      order.Next();
      ++kept;
    }
    sum += weight_of(i);
    if (sum > target) return order.Taken(i);
  }
  // Reached only because of rounding: the sum of the weights may be less than
  // the total computed above.
  return order.Taken(limit - 1);
}

int32_t Choose(const SampleRowArgs& row, int64_t vocab,
               const SampleScratch& scratch, const SampleLoops& loops) {
  const int64_t best = loops.arg_max(scratch.logits, vocab);
  if (best < 0) {
    // If no logit is above -infinity, all allowed ids are equally likely.
    std::fill_n(scratch.weights, vocab, 0.0f);
    ApplyBans(row, vocab, scratch.weights);
    return static_cast<int32_t>(loops.arg_max(scratch.weights, vocab));
  }
  // If the largest logit is infinite, exp_all would compute infinity -
  // infinity, which is NaN. So the id is taken without a draw.
  if (row.temperature <= 0.0f || std::isinf(scratch.logits[best])) {
    return static_cast<int32_t>(best);
  }
  loops.exp_all(scratch.logits, vocab, scratch.logits[best], row.temperature,
                scratch.weights);
  const int32_t drawn = Draw(row, vocab, scratch);
  return drawn >= 0 ? drawn : static_cast<int32_t>(best);
}

void WriteLogprobs(const SampleArgs& params, int64_t index, int32_t token,
                   const SampleScratch& scratch, const SampleLoops& loops) {
  const SampleRowArgs& row = params.rows[index];
  // If a raw logit is infinite or NaN, no log probabilities are reported.
  const bool sound = token != kLogitNotFinite;
  const int64_t want = sound ? std::max<int64_t>(row.num_logprobs, 0) : 0;
  for (int64_t i = want; i < params.max_top; ++i) {
    params.top_ids[index * params.max_top + i] = -1;
    params.top_logprobs[index * params.max_top + i] = 0.0f;
  }
  params.logprobs[index] = 0.0f;
  if (!sound || row.num_logprobs < 0) return;
  const float* logits = params.logits + index * params.row_stride;
  LogSoftmaxState state = {kLowest, 0.0f, kLowest};
  for (int64_t i = 0; i < params.vocab; i += kVocabBlock) {
    loops.add_logit_block(logits + i, std::min(kVocabBlock, params.vocab - i),
                          &state);
  }
  if (token >= 0) {
    params.logprobs[index] = LogProbability(logits[token], state);
  }
  if (want == 0) return;
  for (int64_t id = 0; id < params.vocab; ++id) {
    scratch.order[id] = static_cast<int32_t>(id);
  }
  Descending order(logits, scratch.order, params.vocab);
  for (int64_t i = 0; i < std::min(want, params.max_top); ++i) {
    const int32_t id = order.Next();
    params.top_ids[index * params.max_top + i] = id;
    params.top_logprobs[index * params.max_top + i] =
        LogProbability(logits[id], state);
  }
}

}  // namespace

void SampleOneRow(const SampleArgs& params, int64_t index,
                  const SampleScratch& scratch, const SampleLoops& loops) {
  const SampleRowArgs& row = params.rows[index];
  const float* const logits = params.logits + index * params.row_stride;
  int32_t token = kLogitNotFinite;
  if (loops.all_finite(logits, params.vocab)) {
    std::copy_n(logits, params.vocab, scratch.logits);
    ApplyPenalties(row, params.vocab, scratch.logits);
    ApplyBiases(row, params.vocab, scratch.logits);
    ApplyBans(row, params.vocab, scratch.logits);
    token = Choose(row, params.vocab, scratch, loops);
  }
  params.token_ids[index] = token;
  WriteLogprobs(params, index, token, scratch, loops);
  if (token >= 0 && row.output_counts != nullptr) ++row.output_counts[token];
}

int64_t SampleScratchBytes(int64_t vocab, int64_t threads) {
  return SampleScratch::Bytes(vocab) * threads;
}

}  // namespace kvasir::kernels
