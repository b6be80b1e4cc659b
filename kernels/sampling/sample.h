// sample: draws one token id from each row of logits. C++17.
#pragma once

#include <cstdint>

#include "kernels/device/device_ptr.h"

namespace kvasir::kernels {

// The parameters of one row. A null pointer switches its feature off.
template <template <typename> class Ptr>
struct SampleRowIn {
  float temperature = 1.0f;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  // For ids that occur in the prompt or the output, a logit > 0 is divided by
  // this number, and a logit <= 0 is multiplied by it. 1: off.
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;  // subtracted from logits of ids in the output
  // subtracted once per occurrence in the output
  float frequency_penalty = 0.0f;
  // How often each id occurs in the prompt and in the output, [V]. The op adds
  // the sampled id to output_counts.
  Ptr<const int32_t> prompt_counts = nullptr;
  Ptr<int32_t> output_counts = nullptr;
  // biases[i] is added to the logit of bias_ids[i]; ids outside [0, V) are
  // skipped.
  Ptr<const int32_t> bias_ids = nullptr;
  Ptr<const float> biases = nullptr;
  int32_t num_biases = 0;
  Ptr<const int32_t> banned_ids = nullptr;  // ids that must not be sampled
  int32_t num_banned = 0;
  // [ceil(V / 32)]: bit id % 32 of word id / 32 is set if the id may be
  // sampled.
  Ptr<const uint32_t> allow_mask = nullptr;
  // The next three fields determine the uniform random number for the draw:
  // Philox with the key `seed` and the counter (sample_index, position).
  uint64_t seed = 0;
  uint32_t sample_index = 0;
  uint64_t position = 0;
  // How many of the most likely ids are reported with their log probabilities.
  // 0: only the log probability of the sampled id. -1: nothing.
  int32_t num_logprobs = -1;
};
using SampleRow = SampleRowIn<DevicePtr>;
using SampleRowArgs = SampleRowIn<LaunchPtr>;

// Values in token_ids for rows in which no token was drawn.
inline constexpr int32_t kNoTokenAllowed = -1;
inline constexpr int32_t kLogitNotFinite = -2;

// First, penalties, biases, bans and the mask change the logits. Then
// temperature 0 takes the largest logit. Any other temperature draws an id:
// logits / temperature -> softmax -> top-k -> top-p (the shortest prefix of the
// descending order whose sum reaches top_p) -> min-p (relative to the most
// likely id) -> inverse CDF over the remaining ids, in descending order. Equal
// logits are ordered by id, lower first.
//
// If bans and mask exclude all ids, the result is kNoTokenAllowed. Penalties
// and biases may make logits infinite. An id with a logit of infinity is always
// taken. If all are -infinity, the lowest id that is not excluded is taken.
//
// No token is drawn from a row with a raw logit that is infinite or NaN. The
// row's result is then kLogitNotFinite.
//
// Log probabilities are the model's: log-softmax of the raw logits, before
// penalties, masks and temperature. The list of top ids is in descending order
// of raw logits. Its entries after num_logprobs are -1 (id) and 0 (log
// probability).
template <template <typename> class Ptr>
struct SampleParamsIn {
  Ptr<const float> logits = nullptr;           // [B, V]
  int64_t row_stride = 0;                      // in elements
  int64_t num_rows = 0;                        // B
  int64_t vocab = 0;                           // V
  Ptr<const SampleRowIn<Ptr>> rows = nullptr;  // [B]
  Ptr<int32_t> token_ids = nullptr;            // [B]
  Ptr<float> logprobs = nullptr;               // [B]; 0 if num_logprobs is -1
  int64_t max_top = 0;                // Ntop, at least every row's num_logprobs
  Ptr<int32_t> top_ids = nullptr;     // [B, Ntop]; may be null when Ntop is 0
  Ptr<float> top_logprobs = nullptr;  // [B, Ntop]

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(logits, rows, token_ids, logprobs, top_ids, top_logprobs);
  }
};
using SampleParams = SampleParamsIn<DevicePtr>;
using SampleArgs = SampleParamsIn<LaunchPtr>;

class CpuStream;
void SampleReference(const SampleArgs& params, void* scratch,
                     CpuStream& stream);
void SampleSimd(const SampleArgs& params, void* scratch, CpuStream& stream);
// Returns the bytes of scratch for `threads` threads on a CPU.
int64_t SampleScratchBytes(int64_t vocab, int64_t threads);
// Lists of up to this many top ids need no scratch on a GPU.
inline constexpr int64_t kMostSharedTop = 2048;
// Returns the bytes of a row's scratch on a GPU. They hold the adjusted logits
// and, if the list of top ids is longer than kMostSharedTop, the list's keys.
inline constexpr int64_t SampleDeviceRowBytes(int64_t vocab, int64_t max_top) {
  const int64_t keys = max_top > kMostSharedTop ? 8 * max_top : 0;
  return (keys + 63) / 64 * 64 + (4 * vocab + 63) / 64 * 64;
}

// Ids of a sequence, to be added to prompt_counts or output_counts of a
// SampleRow. An entry without ids and without `clear` has no effect (padding).
template <template <typename> class Ptr>
struct TokenHistoryIn {
  Ptr<const int32_t> ids = nullptr;  // ids outside [0, V) are skipped
  int64_t num_ids = 0;
  // [V]; no other history of the same launch may use these counts
  Ptr<int32_t> counts = nullptr;
  bool clear = false;  // set all counts to 0 first
};
using TokenHistory = TokenHistoryIn<DevicePtr>;
using TokenHistoryArgs = TokenHistoryIn<LaunchPtr>;

// count_tokens: adds 1 to counts[ids[i]] for each i of each history.
template <template <typename> class Ptr>
struct CountTokensParamsIn {
  Ptr<const TokenHistoryIn<Ptr>> rows = nullptr;  // [num_rows]
  int64_t num_rows = 0;
  int64_t vocab = 0;  // V

  template <typename Visit>
  void ForPointers(const Visit& visit) const {
    visit(rows);
  }
};
using CountTokensParams = CountTokensParamsIn<DevicePtr>;
using CountTokensArgs = CountTokensParamsIn<LaunchPtr>;

void CountTokensReference(const CountTokensArgs& params, CpuStream& stream);

}  // namespace kvasir::kernels
