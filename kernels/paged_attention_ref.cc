#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/paged_attention.h"
#include "kernels/scalar_math.h"
#include "kernels/stream.h"

namespace kvasir::kernels {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// Softmax so far: maximum, sum and unnormalised output, [value.width].
struct Partial {
  float max = kLowest;
  float sum = 0.0f;
  float* out = nullptr;
};

// One row and head, with the addresses of its slots.
class Row {
 public:
  Row(const PagedAttentionParams& params, const AttentionSequence& sequence,
      int64_t row, int64_t head)
      : params_(params), sequence_(sequence) {
    const int64_t kv_head = head / (params.num_heads / params.num_kv_heads);
    key_group_ = params.key_group ? params.key_group[kv_head] : kv_head;
    value_group_ = params.value_group ? params.value_group[kv_head] : kv_head;
    q_ = params.q + (sequence.first_row + row) * params.q_row_stride +
         head * params.key.width;
    slots_ = VisibleSlots(params, sequence, row);
  }

  VisibleRange slots() const { return slots_; }

  float Score(int64_t slot) const {
    return VisitDType(params_.key.dtype, [&](auto type) {
      const auto* key = reinterpret_cast<const decltype(type)*>(
          Address(params_.key, key_group_, slot));
      float sum = 0.0f;
      for (int64_t i = 0; i < params_.key.width; ++i) {
        sum = std::fma(q_[i], ToFloat(key[i]), sum);
      }
      return sum * params_.scale;
    });
  }

  void AddValue(int64_t slot, float weight, float* out) const {
    VisitDType(params_.value.dtype, [&](auto type) {
      const auto* value = reinterpret_cast<const decltype(type)*>(
          Address(params_.value, value_group_, slot));
      for (int64_t i = 0; i < params_.value.width; ++i) {
        out[i] = std::fma(weight, ToFloat(value[i]), out[i]);
      }
    });
  }

 private:
  const char* Address(const KvSideView& view, int64_t group,
                      int64_t slot) const {
    const int64_t page = sequence_.block_table[slot / params_.page_tokens];
    return SlotAddress(view, page, group, slot % params_.page_tokens);
  }

  const PagedAttentionParams& params_;
  const AttentionSequence& sequence_;
  int64_t key_group_;
  int64_t value_group_;
  const float* q_;
  VisibleRange slots_;
};

// Adds the slots [begin, end) of one block to the partial result.
void AddBlock(const Row& row, int64_t begin, int64_t end, int64_t width,
              Partial* partial) {
  float scores[kAttentionBlockSlots];
  float lanes[kLanes];
  std::fill_n(scores, kAttentionBlockSlots, kLowest);
  std::fill_n(lanes, kLanes, kLowest);
  const int64_t block = begin / kAttentionBlockSlots * kAttentionBlockSlots;
  for (int64_t s = begin; s < end; ++s) scores[s - block] = row.Score(s);
  for (int64_t i = 0; i < kAttentionBlockSlots; ++i) {
    float& lane = lanes[i % kLanes];
    lane = scores[i] > lane ? scores[i] : lane;
  }
  const float block_max = TreeMax(lanes);
  const float max = partial->max > block_max ? partial->max : block_max;
  const float correction = Exp(partial->max - max);
  std::fill_n(lanes, kLanes, 0.0f);
  for (int64_t i = 0; i < kAttentionBlockSlots; ++i) {
    scores[i] = Exp(scores[i] - max);
    lanes[i % kLanes] = lanes[i % kLanes] + scores[i];
  }
  partial->sum = std::fma(partial->sum, correction, TreeSum(lanes));
  for (int64_t i = 0; i < width; ++i) {
    partial->out[i] = partial->out[i] * correction;
  }
  for (int64_t s = begin; s < end; ++s) {
    row.AddValue(s, scores[s - block], partial->out);
  }
  partial->max = max;
}

void Merge(const Partial& part, int64_t width, Partial* total) {
  const float max = total->max > part.max ? total->max : part.max;
  const float old_factor = Exp(total->max - max);
  const float new_factor = Exp(part.max - max);
  total->sum = std::fma(total->sum, old_factor, part.sum * new_factor);
  for (int64_t i = 0; i < width; ++i) {
    total->out[i] =
        std::fma(total->out[i], old_factor, part.out[i] * new_factor);
  }
  total->max = max;
}

void Attend(const Row& row, int64_t width, float* part_out, float* out) {
  Partial total;
  total.out = out;
  std::fill_n(out, width, 0.0f);
  const VisibleRange slots = row.slots();
  for (int64_t s = slots.begin; s < slots.end;) {
    const int64_t split_end = std::min(
        slots.end, (s / kAttentionSplitSlots + 1) * kAttentionSplitSlots);
    Partial part;
    part.out = part_out;
    std::fill_n(part_out, width, 0.0f);
    while (s < split_end) {
      const int64_t block_end = std::min(
          split_end, (s / kAttentionBlockSlots + 1) * kAttentionBlockSlots);
      AddBlock(row, s, block_end, width, &part);
      s = block_end;
    }
    Merge(part, width, &total);
  }
  if (slots.begin >= slots.end) return;
  for (int64_t i = 0; i < width; ++i) out[i] = out[i] / total.sum;
}

}  // namespace

void PagedAttentionReference(const PagedAttentionParams& params, float* scratch,
                             CpuStream&) {
  const int64_t width = params.value.width;
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttentionSequence& sequence = params.sequences[i];
    for (int64_t r = 0; r < sequence.num_rows; ++r) {
      float* out =
          params.out + (sequence.first_row + r) * params.out_row_stride;
      for (int64_t h = 0; h < params.num_heads; ++h) {
        Attend(Row(params, sequence, r, h), width, scratch, out + h * width);
      }
    }
  }
}

}  // namespace kvasir::kernels
