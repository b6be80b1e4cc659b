#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/attention/grid/attention_grid.h"
#include "kernels/attention/params/code_digits.h"
#include "kernels/device/stream.h"
#include "kernels/latents/code_pack.h"
#include "kernels/simd/scalar_math.h"

namespace kvasir::kernels {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// The bytes of a slot in a region, as one contiguous array. If they are stored
// in several granules, they are copied.
class SlotBytes {
 public:
  SlotBytes(const LatentPartArgs& part, const TileRegion& region, int64_t page,
            int64_t slot, int64_t count) {
    if (region.granule_bytes == 0) {
      bytes_ = SlotAddress(part, region, page, slot);
      return;
    }
    gathered_.resize(static_cast<size_t>(count));
    ForSlotBytes(part, region, page, slot, count,
                 [this](const char* from, int64_t first, int64_t run) {
                   std::copy_n(from, run, gathered_.begin() + first);
                 });
    bytes_ = gathered_.data();
  }
  SlotBytes(SlotBytes&&) = default;
  SlotBytes& operator=(SlotBytes&&) = default;

  template <typename T>
  const T* as() const {
    return reinterpret_cast<const T*>(bytes_);
  }

 private:
  std::vector<char> gathered_;
  const char* bytes_;
};

// The latent of a slot: its codes or unquantized numbers, and its ranges.
struct Latent {
  Latent(const LatentPartArgs& in, const LatentGroup& latent_group,
         int64_t page, int64_t slot)
      : part(&in),
        group(&latent_group),
        codes(in, latent_group.codes, page, slot, CodesBytes(in, latent_group)),
        ranges(in, latent_group.params, page, slot,
               ParamsBytes(in, latent_group)) {}

  const LatentPartArgs* part;
  const LatentGroup* group;
  SlotBytes codes;
  SlotBytes ranges;
};

float ReadRange(const Latent& latent, int64_t index) {
  return VisitDType(latent.part->param_dtype, [&](auto type) {
    return ToFloat(latent.ranges.as<decltype(type)>()[index]);
  });
}

// Calls visit(run, r, place) for each run of codes.
template <typename Visit>
void ForRuns(const LatentGroup& group, const Visit& visit) {
  CodeCursor cursor(group);
  for (int64_t r = 0; r < group.num_runs; ++r) {
    visit(group.runs[r], r, cursor.Next(group.runs[r]));
  }
}

// Returns the number for which a code stands before its range is applied: its
// level or the code itself.
float CodeOf(const Latent& latent, const CodePlace& place, int64_t index) {
  const unsigned code = ReadCode(latent.codes.as<uint8_t>(), place, index);
  return latent.part->num_levels > 0 ? latent.part->levels[code]
                                     : static_cast<float>(code);
}

struct SlotRange {
  float scale;
  float minimum;
};
SlotRange RangeOf(const Latent& latent, int64_t r) {
  if (latent.part->num_levels > 0) return {ReadRange(latent, 0), 0.0f};
  return {ReadRange(latent, 2 * r), ReadRange(latent, 2 * r + 1)};
}

float DotNumbers(const float* a, const Latent& latent) {
  return VisitDType(latent.part->dtype, [&](auto type) {
    const auto* numbers = latent.codes.as<decltype(type)>();
    float sum = 0.0f;
    for (int64_t c = 0; c < latent.group->width; ++c) {
      sum = std::fma(a[c], ToFloat(numbers[c]), sum);
    }
    return sum;
  });
}

float DotStaticCodes(const float* a, const Latent& latent) {
  const float* scale = latent.part->static_scale + latent.group->column;
  const float* minimum = latent.part->static_minimum + latent.group->column;
  float codes = 0.0f;
  float minima = 0.0f;
  ForRuns(*latent.group, [&](const CodeRun& run, int64_t, CodePlace place) {
    for (int64_t i = 0; i < run.width; ++i) {
      const int64_t c = run.begin + i;
      codes = std::fma(a[c] * scale[c], CodeOf(latent, place, i), codes);
      minima = std::fma(a[c], minimum[c], minima);
    }
  });
  return codes + minima;
}

float DotCodes(const float* a, const Latent& latent) {
  float dot = 0.0f;
  ForRuns(*latent.group, [&](const CodeRun& run, int64_t r, CodePlace place) {
    float raw = 0.0f;
    float sum = 0.0f;
    for (int64_t i = 0; i < run.width; ++i) {
      raw = std::fma(a[run.begin + i], CodeOf(latent, place, i), raw);
      sum = sum + a[run.begin + i];
    }
    const SlotRange range = RangeOf(latent, r);
    dot = std::fma(raw, range.scale, dot);
    dot = std::fma(sum, range.minimum, dot);
  });
  return dot;
}

float Dot(const float* a, const Latent& latent) {
  if (latent.group->num_runs == 0) return DotNumbers(a, latent);
  return latent.part->static_scale != nullptr ? DotStaticCodes(a, latent)
                                              : DotCodes(a, latent);
}

// Returns the integer for which a code stands in products of digits: the
// integer of its level or the code itself.
int32_t IntegerOf(const Latent& latent, const int8_t* levels,
                  const CodePlace& place, int64_t index) {
  const unsigned code = ReadCode(latent.codes.as<uint8_t>(), place, index);
  return levels != nullptr ? levels[code] : static_cast<int32_t>(code);
}

// Returns the score of a key part that is absorbed and stored as codes.
float ScoreCodes(const float* q, const Latent& latent) {
  const LatentPartArgs& part = *latent.part;
  const bool in_slots = part.static_scale == nullptr;
  const int64_t column = latent.group->column;
  LevelIntegers levels;
  if (part.num_levels > 0) levels = LevelIntegersOf(part);
  float score = 0.0f;
  float minima = 0.0f;
  ForRuns(*latent.group, [&](const CodeRun& run, int64_t r, CodePlace place) {
    float raw = in_slots ? 0.0f : score;
    float sum = 0.0f;
    for (int64_t first = 0; first < run.width; first += kDigitChannels) {
      const int64_t width = std::min(kDigitChannels, run.width - first);
      float numbers[kDigitChannels];
      DigitRange range;
      for (int64_t i = 0; i < width; ++i) {
        const int64_t c = run.begin + first + i;
        sum = sum + q[c];
        numbers[i] = in_slots ? q[c] : q[c] * part.static_scale[column + c];
        range.Add(numbers[i]);
        if (in_slots) continue;
        minima = std::fma(q[c], part.static_minimum[column + c], minima);
      }
      const DigitScale cut = DigitScale::Of(range.largest(), kMostQueryDigits);
      int32_t total = 0;
      for (int64_t i = 0; run.bits > 0 && i < width; ++i) {
        total +=
            cut.Round(numbers[i]) *
            IntegerOf(latent, part.num_levels > 0 ? levels.integers : nullptr,
                      place, first + i);
      }
      if (run.bits == 0) continue;
      raw = std::fma(cut.unit * levels.step, static_cast<float>(total), raw);
    }
    if (!in_slots) {
      score = raw;
      return;
    }
    const SlotRange range = RangeOf(latent, r);
    score = std::fma(raw, range.scale, score);
    score = std::fma(sum, range.minimum, score);
  });
  return score + minima;
}

// Writes all numbers of the latent to `numbers`, decoded if they are stored as
// codes.
void ReadNumbers(const Latent& latent, float* numbers) {
  if (latent.group->num_runs == 0) {
    VisitDType(latent.part->dtype, [&](auto type) {
      for (int64_t c = 0; c < latent.group->width; ++c) {
        numbers[c] = ToFloat(latent.codes.as<decltype(type)>()[c]);
      }
    });
    return;
  }
  const bool in_slots = latent.part->static_scale == nullptr;
  ForRuns(*latent.group, [&](const CodeRun& run, int64_t r, CodePlace place) {
    for (int64_t i = 0; i < run.width; ++i) {
      const int64_t c = latent.group->column + run.begin + i;
      const SlotRange range = in_slots
                                  ? RangeOf(latent, r)
                                  : SlotRange{latent.part->static_scale[c],
                                              latent.part->static_minimum[c]};
      numbers[run.begin + i] =
          std::fma(CodeOf(latent, place, i), range.scale, range.minimum);
    }
  });
}

// Returns key_j as paged_attention.h defines it, [d].
std::vector<float> RebuildKey(const KeyRebuildArgs& rebuild, int64_t kv_head,
                              const Latent& latent, int64_t position) {
  const int64_t dims = rebuild.dims;
  std::vector<float> key(static_cast<size_t>(dims));
  if (rebuild.up == nullptr) ReadNumbers(latent, key.data());
  for (int64_t i = 0; i < dims; ++i) {
    float& number = key[static_cast<size_t>(i)];
    if (rebuild.up != nullptr) {
      number = Dot(rebuild.up[kv_head] + i * latent.group->width, latent);
    }
    if (rebuild.bias != nullptr) {
      number = number + rebuild.bias[kv_head * dims + i];
    }
  }
  const uint64_t* steps = rebuild.steps + kv_head * rebuild.head_steps_stride;
  for (int64_t f = 0; f < rebuild.num_pairs; ++f) {
    const ReducedAngle angle =
        ReduceTurns(steps[f] * static_cast<uint64_t>(position));
    float sine, cosine;
    SinCosReduced(angle.remainder, &sine, &cosine);
    RotateByQuarter(angle.quarter, sine, cosine, &sine, &cosine);
    cosine = cosine * rebuild.attention_factor;
    sine = sine * rebuild.attention_factor;
    float& first = key[static_cast<size_t>(rebuild.pair_dims[2 * f])];
    float& second = key[static_cast<size_t>(rebuild.pair_dims[2 * f + 1])];
    const float a = first;
    const float b = second;
    first = std::fma(a, cosine, -(b * sine));
    second = std::fma(b, cosine, a * sine);
  }
  return key;
}

// Returns value_j as paged_attention.h defines it, [d].
std::vector<float> LiftValue(const ValueLiftArgs& lift, int64_t kv_head,
                             const Latent& latent) {
  std::vector<float> value(static_cast<size_t>(lift.dims));
  std::vector<float> column(static_cast<size_t>(latent.group->width));
  for (size_t i = 0; i < value.size(); ++i) {
    for (size_t c = 0; c < column.size(); ++c) {
      column[c] = lift.up[kv_head][c * value.size() + i];
    }
    value[i] = Dot(column.data(), latent);
  }
  return value;
}

// The sums of weight * value for one row and one value part, before they are
// divided by the sum of weights.
struct ValueSum {
  const AttentionValuePartArgs* part;
  const LatentGroup* group;
  int64_t kv_head;
  // True if the part has static ranges and exact rows.
  bool sums_weights = false;
  std::vector<float> out = {};  // [R'], or [d] if values are lifted
  // If ranges are in slots: the sums of weight * minimum [runs]. If
  // sums_weights: the sum of weights.
  std::vector<float> minima = {};
  std::vector<float> exact = {};  // [R']: sums of exact rows, if sums_weights

  // Adds the values of one slot, except absorbed codes.
  void Add(float weight, const Latent& latent);
  // Adds the absorbed codes of a block. `latents` has the latents of the
  // block's slots from slot `first` of the block on.
  void AddCodes(const float* weights, const std::vector<Latent>& latents,
                int64_t first);
  void AddNumbers(float weight, const Latent& latent, std::vector<float>* to);
  // Multiplies all sums by `factor`, because the maximum of the softmax has
  // changed.
  void Correct(float factor) {
    for (std::vector<float>* sums : {&out, &minima, &exact}) {
      for (float& sum : *sums) sum = sum * factor;
    }
  }
  // Adds weight * minimum over a block's slots to `minima`. Lane i sums slots
  // i, i + 16, ...
  void AddMinima(const float* weights, const std::vector<Latent>& latents,
                 int64_t first);
  void EndSplit();
};

void ValueSum::AddNumbers(float weight, const Latent& latent,
                          std::vector<float>* to) {
  VisitDType(latent.part->dtype, [&](auto type) {
    const auto* numbers = latent.codes.as<decltype(type)>();
    for (size_t c = 0; c < to->size(); ++c) {
      (*to)[c] = std::fma(weight, ToFloat(numbers[c]), (*to)[c]);
    }
  });
}

void ValueSum::Add(float weight, const Latent& latent) {
  if (part->lift != nullptr) {
    const std::vector<float> value = LiftValue(*part->lift, kv_head, latent);
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = std::fma(weight, value[i], out[i]);
    }
    return;
  }
  if (latent.group->num_runs == 0) {
    AddNumbers(weight, latent, sums_weights ? &exact : &out);
  }
}

void ValueSum::AddCodes(const float* weights,
                        const std::vector<Latent>& latents, int64_t first) {
  if (part->lift != nullptr || group->num_runs == 0) return;
  const bool in_slots = part->latents.static_scale == nullptr;
  LevelIntegers levels;
  const bool by_level = part->latents.num_levels > 0;
  if (by_level) levels = LevelIntegersOf(part->latents);
  ForRuns(*group, [&](const CodeRun& run, int64_t r, CodePlace place) {
    if (run.bits == 0) return;
    std::vector<float> scaled(latents.size());
    DigitRange range;
    for (size_t i = 0; i < latents.size(); ++i) {
      if (latents[i].group->num_runs == 0) continue;  // read as an exact row
      const float weight = weights[first + static_cast<int64_t>(i)];
      scaled[i] = in_slots ? weight * RangeOf(latents[i], r).scale : weight;
      range.Add(scaled[i]);
    }
    const DigitScale cut = DigitScale::Of(range.largest(), kMostWeightDigits);
    for (int64_t c = 0; c < run.width; ++c) {
      int32_t total = 0;
      for (size_t i = 0; i < latents.size(); ++i) {
        if (latents[i].group->num_runs == 0) continue;
        total += cut.Round(scaled[i]) *
                 IntegerOf(latents[i], by_level ? levels.integers : nullptr,
                           place, c);
      }
      float& sum = out[static_cast<size_t>(run.begin + c)];
      sum = std::fma(cut.unit * levels.step, static_cast<float>(total), sum);
    }
  });
}

// `latents` has the latents of the block's slots from slot `first` of the block
// on. Slots that are read as exact rows have no minima.
void ValueSum::AddMinima(const float* weights,
                         const std::vector<Latent>& latents, int64_t first) {
  const bool in_slots = part->latents.static_scale == nullptr;
  if (part->lift != nullptr || (!in_slots && !sums_weights)) return;
  for (size_t r = 0; r < (in_slots ? minima.size() : 1); ++r) {
    float lanes[kLanes] = {};
    for (size_t i = 0; i < latents.size(); ++i) {
      if (latents[i].group->num_runs == 0) continue;
      const int64_t s = first + static_cast<int64_t>(i);
      const float factor =
          in_slots ? RangeOf(latents[i], static_cast<int64_t>(r)).minimum
                   : 1.0f;
      float& lane = lanes[s % kLanes];
      lane = std::fma(weights[s], factor, lane);
    }
    minima[r] = minima[r] + TreeSum(lanes);
  }
}

void ValueSum::EndSplit() {
  const LatentPartArgs& latents = part->latents;
  if (part->lift != nullptr) return;
  for (size_t i = 0; sums_weights && i < out.size(); ++i) {
    const auto c = static_cast<size_t>(group->column) + i;
    out[i] = std::fma(out[i], latents.static_scale[c],
                      minima[0] * latents.static_minimum[c]) +
             exact[i];
  }
  if (latents.static_scale != nullptr) return;
  for (int64_t r = 0; r < group->num_runs; ++r) {
    const CodeRun& run = group->runs[r];
    for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
      float& sum = out[static_cast<size_t>(c)];
      sum = sum + minima[static_cast<size_t>(r)];
    }
  }
}

// An unfinished softmax: its maximum, the sum of weights and the output before
// division by this sum.
struct Partial {
  float max = kLowest;
  float sum = 0.0f;
  std::vector<ValueSum> values;  // one for each value part
};

// Computes attention for one query head in one row of q.
class Row {
 public:
  Row(const PagedAttentionArgs& params, const AttentionSequence& sequence,
      int64_t row, int64_t head)
      : params_(params),
        sequence_(sequence),
        head_(head),
        kv_head_(head / (params.num_heads / params.num_kv_heads)),
        row_(row),
        q_(params.q + (sequence.first_row + row) * params.q_row_stride),
        out_(params.out + (sequence.first_row + row) * params.out_row_stride),
        slots_(VisibleSlots(params, sequence, row)) {}

  void Attend();
  // Adds each visible slot's share of the softmax to its attention mass. Attend
  // must be called before.
  void AddMass() const;

 private:
  // Returns the latent or exact row that this row reads for a slot. `exact` is
  // key_exact for a key part and value_exact for a value part.
  template <typename Part>
  Latent Find(const Part& part, const ExactSlots& exact, int64_t slot) const {
    if (!exact.Has(sequence_.first_slot + row_, slot)) {
      return At(part.latents, part.group_of_head, slot);
    }
    const int32_t group = part.group_of_head[kv_head_];
    const int64_t fresh = slot - sequence_.first_slot;
    const LatentPartArgs& rows =
        fresh >= 0 ? part.exact->fresh : part.exact->ring;
    if (fresh >= 0) {
      return {rows, rows.groups[group], 0, sequence_.first_row + fresh};
    }
    LatentPartArgs row = rows;
    row.arena = static_cast<char*>(row.arena) +
                exact
                    .PlaceOfRow(exact.RowOf(slot, sequence_.evicted),
                                sequence_.side_pages.device_address())
                    .offset_bytes;
    Latent latent(row, rows.groups[group], 0, 0);
    latent.part = &rows;
    return latent;
  }
  Latent At(const LatentPartArgs& part, const int32_t* group_of_head,
            int64_t slot) const {
    const LatentGroup& group = part.groups[group_of_head[kv_head_]];
    const int64_t page =
        sequence_.block_table.device_address()[slot / params_.page_tokens];
    return {part, group, page, slot % params_.page_tokens};
  }

  Partial EmptyPartial() const;
  int64_t PositionOf(int64_t slot) const;
  float AddKeyBias(int64_t slot, float score) const;
  float Score(int64_t slot) const;
  void AddBlock(int64_t begin, int64_t end, Partial* partial);
  Partial ComputeSplit(int64_t begin, int64_t end);
  void Finish(const Partial& total) const;

  const PagedAttentionArgs& params_;
  const AttentionSequence& sequence_;
  const int64_t head_;
  const int64_t kv_head_;
  const int64_t row_;
  const float* const q_;
  float* const out_;
  const VisibleRange slots_;

  // The weight of each visible slot, relative to the maximum of the split up to
  // the end of the slot's block. max_ and sum_ are the maximum and sum of the
  // whole softmax.
  struct Weight {
    float weight;
    float block_max;
  };
  std::vector<Weight> weights_;
  float max_ = kLowest;
  float sum_ = 0.0f;
};

Partial Row::EmptyPartial() const {
  Partial partial;
  for (int64_t p = 0; p < params_.num_value_parts; ++p) {
    const AttentionValuePartArgs& part = params_.values[p];
    ValueSum value;
    const int32_t group = part.group_of_head[kv_head_];
    value.part = &part;
    value.group = &part.latents.groups[group];
    value.kv_head = kv_head_;
    value.sums_weights = part.lift == nullptr && value.group->num_runs > 0 &&
                         part.latents.static_scale != nullptr &&
                         params_.value_exact.any();
    value.out.resize(static_cast<size_t>(OutWidth(part, group)));
    value.minima.resize(static_cast<size_t>(value.group->num_runs));
    if (value.sums_weights) value.exact.resize(value.out.size());
    partial.values.push_back(std::move(value));
  }
  return partial;
}

int64_t Row::PositionOf(int64_t slot) const {
  if (params_.mass.stored_positions) {
    const int64_t page =
        sequence_.block_table.device_address()[slot / params_.page_tokens];
    return PositionsOf(
        params_.metadata, page,
        params_.unit_of_head[kv_head_])[slot % params_.page_tokens];
  }
  return sequence_.positions ? sequence_.positions.device_address()[slot]
                             : slot;
}

float Row::AddKeyBias(int64_t slot, float score) const {
  const AttentionKeyBias& bias = *params_.key_bias;
  const uint64_t* const steps =
      bias.steps + kv_head_ * (bias.tile_pairs + bias.exact_pairs);
  const float* const q = q_ + bias.query_column[head_];
  const int64_t position = PositionOf(slot);
  const auto centre = static_cast<uint64_t>(KeyBiasCentre(position));
  float lanes[kLanes] = {};
  for (int64_t i = 0; i < 2 * bias.tile_pairs; ++i) {
    const bool cosine = i < bias.tile_pairs;
    const UnitVector at =
        UnitVectorAt(steps[cosine ? i : i - bias.tile_pairs] * centre);
    float& lane = lanes[i % kLanes];
    lane = std::fma(bias.unit * q[i], cosine ? at.cosine : at.sine, lane);
  }
  score = score + TreeSum(lanes);
  const auto in_tile = static_cast<uint64_t>(position % kKeyBiasTile);
  const float* numbers = q + KeyBiasTileColumns(bias.tile_pairs);
  for (int64_t e = 0; e < bias.exact_pairs; ++e, numbers += 2) {
    const uint64_t step = steps[bias.tile_pairs + e];
    const UnitVector first =
        UnitVectorAt(step * (static_cast<uint64_t>(position) - in_tile));
    const UnitVector turn = UnitVectorAt(step * in_tile);
    score = std::fma(
        bias.unit * numbers[0],
        std::fma(first.cosine, turn.cosine, -(first.sine * turn.sine)), score);
    score = std::fma(
        bias.unit * numbers[1],
        std::fma(first.sine, turn.cosine, first.cosine * turn.sine), score);
  }
  return score;
}

float Row::Score(int64_t slot) const {
  float score = 0.0f;
  for (int64_t p = 0; p < params_.num_key_parts; ++p) {
    const AttentionKeyPartArgs& part = params_.keys[p];
    const Latent latent = Find(part, params_.key_exact, slot);
    const float* q = q_ + part.query_column[head_];
    float dot = 0.0f;
    if (part.rebuild == nullptr) {
      dot = latent.group->num_runs > 0 ? ScoreCodes(q, latent)
                                       : DotNumbers(q, latent);
    } else {
      const std::vector<float> key =
          RebuildKey(*part.rebuild, kv_head_, latent, PositionOf(slot));
      for (size_t i = 0; i < key.size(); ++i) {
        dot = std::fma(q[i], key[i], dot);
      }
    }
    score = p == 0 ? dot : score + dot;
  }
  if (params_.key_bias != nullptr) score = AddKeyBias(slot, score);
  score = score * params_.scale;
  return params_.score_cap > 0.0f ? SoftCap(score, params_.score_cap) : score;
}

// Adds slots [begin, end), which are in one block, to the partial result.
void Row::AddBlock(int64_t begin, int64_t end, Partial* partial) {
  float scores[kAttentionBlockSlots];
  float lanes[kLanes];
  std::fill_n(scores, kAttentionBlockSlots, kLowest);
  std::fill_n(lanes, kLanes, kLowest);
  const int64_t block = begin / kAttentionBlockSlots * kAttentionBlockSlots;
  for (int64_t s = begin; s < end; ++s) scores[s - block] = Score(s);
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
  for (ValueSum& value : partial->values) {
    value.Correct(correction);
    std::vector<Latent> latents;
    for (int64_t s = begin; s < end; ++s) {
      latents.push_back(Find(*value.part, params_.value_exact, s));
    }
    // Sinks come before the codes, and the window after them.
    bool added = false;
    for (int64_t s = begin; s < end; ++s) {
      const Latent& latent = latents[static_cast<size_t>(s - begin)];
      if (!added && latent.group->num_runs > 0) {
        value.AddCodes(scores, latents, begin - block);
        added = true;
      }
      value.Add(scores[s - block], latent);
    }
    value.AddMinima(scores, latents, begin - block);
  }
  partial->max = max;
  for (int64_t s = begin; s < end; ++s) {
    weights_.push_back({scores[s - block], max});
  }
}

Partial Row::ComputeSplit(int64_t begin, int64_t end) {
  Partial part = EmptyPartial();
  while (begin < end) {
    const int64_t block_end = std::min(
        end, (begin / kAttentionBlockSlots + 1) * kAttentionBlockSlots);
    AddBlock(begin, block_end, &part);
    begin = block_end;
  }
  for (ValueSum& value : part.values) value.EndSplit();
  return part;
}

void Merge(const Partial& part, Partial* total) {
  const float max = total->max > part.max ? total->max : part.max;
  const float old_factor = Exp(total->max - max);
  const float new_factor = Exp(part.max - max);
  total->sum = std::fma(total->sum, old_factor, part.sum * new_factor);
  for (size_t p = 0; p < part.values.size(); ++p) {
    const std::vector<float>& from = part.values[p].out;
    std::vector<float>& to = total->values[p].out;
    for (size_t i = 0; i < to.size(); ++i) {
      to[i] = std::fma(to[i], old_factor, from[i] * new_factor);
    }
  }
  total->max = max;
}

void Row::Finish(const Partial& total) const {
  for (const ValueSum& value : total.values) {
    const LatentPartArgs& latents = value.part->latents;
    float* out = out_ + value.part->out_column[head_];
    const bool lifted = value.part->lift != nullptr;
    for (int64_t i = 0; i < static_cast<int64_t>(value.out.size()); ++i) {
      float sum = value.out[static_cast<size_t>(i)];
      if (latents.static_scale != nullptr && !value.sums_weights && !lifted) {
        const int64_t c = value.group->column + i;
        sum = std::fma(sum, latents.static_scale[c],
                       total.sum * latents.static_minimum[c]);
      }
      out[i] = slots_.begin < slots_.end ? sum / total.sum : 0.0f;
    }
  }
}

void Row::Attend() {
  Partial total = EmptyPartial();
  for (int64_t s = slots_.begin; s < slots_.end;) {
    const int64_t end = std::min(
        slots_.end, (s / kAttentionSplitSlots + 1) * kAttentionSplitSlots);
    Merge(ComputeSplit(s, end), &total);
    s = end;
  }
  Finish(total);
  max_ = total.max;
  sum_ = total.sum;
}

void Row::AddMass() const {
  const float inverse = 1.0f / sum_;
  for (size_t i = 0; i < weights_.size(); ++i) {
    const int64_t slot = slots_.begin + static_cast<int64_t>(i);
    const int64_t page =
        sequence_.block_table.device_address()[slot / params_.page_tokens];
    float& mass =
        ScoresOf(params_.metadata, page,
                 params_.unit_of_head[kv_head_])[slot % params_.page_tokens];
    mass = std::fma(weights_[i].weight,
                    Exp(weights_[i].block_max - max_) * inverse, mass);
  }
}

}  // namespace

void PagedAttentionReference(const AttentionLaunchArgs& launch, float*,
                             CpuStream&) {
  const PagedAttentionArgs params = launch.grid->stored_params();
  for (int64_t i = 0; i < params.num_sequences; ++i) {
    const AttentionSequence& sequence = params.sequences[i];
    for (int64_t r = 0; r < sequence.num_rows; ++r) {
      for (int64_t h = 0; h < params.num_heads; ++h) {
        Row row(params, sequence, r, h);
        row.Attend();
        if (params.mass.most_rows > 0 && r >= sequence.first_counted_row) {
          row.AddMass();
        }
      }
    }
  }
}

}  // namespace kvasir::kernels
