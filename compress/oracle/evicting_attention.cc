#include "compress/oracle/evicting_attention.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "base/error_byte.h"
#include "base/philox.h"
#include "cache/eviction/eviction_schedule.h"
#include "compress/oracle/slot_choice.h"

namespace kvasir::compress {
namespace {

// The queries, keys and values of one unit (Hu KV heads that evict together) in
// one sequence. Each KV head has `share` query heads.
struct UnitHeads {
  at::Tensor query;       // [Hu, share, T, W]
  at::Tensor key;         // [Hu, T, W]
  at::Tensor value;       // [Hu, T, Wv]
  at::Tensor near_key;    // undefined without a window
  at::Tensor near_value;  // undefined without a window
};

std::vector<float> Floats(const at::Tensor& tensor) {
  const at::Tensor host = tensor.detach().to(at::kCPU, at::kFloat).contiguous();
  const float* data = host.data_ptr<float>();
  return {data, data + host.numel()};
}

at::Tensor Positions(const std::vector<int64_t>& positions, at::Device device) {
  return at::tensor(positions, at::kLong).to(device);
}

// Computes the attention of one unit (KV heads that evict together) in one
// sequence, from the first token to the last.
class UnitRun {
 public:
  UnitRun(const AttentionInputs& inputs, const EvictionInputs& eviction,
          int64_t batch, int64_t unit)
      : inputs_(inputs),
        eviction_(eviction),
        rule_(eviction.rule->layer.slots),
        batch_(batch),
        unit_(unit),
        length_(inputs.query.size(1)),
        prompt_(eviction.rule->prompt_tokens > 0 ? eviction.rule->prompt_tokens
                                                 : length_),
        schedule_(eviction.rule->layer.counts, prompt_),
        heads_(HeadsOf()),
        key_error_(ErrorsOf(eviction.key_error)),
        value_error_(ErrorsOf(eviction.value_error)) {}

  // Returns the attention's output [T, Hu, share, Wv].
  at::Tensor Run() {
    std::vector<at::Tensor> blocks;
    for (int64_t begin = 0; begin < length_;) {
      if (schedule_.IsPoint(begin)) Evict(begin);
      const int64_t end =
          std::min(schedule_.NextPoint(begin).value_or(length_), length_);
      mass_.resize(positions_.size() + static_cast<size_t>(end - begin));
      for (int64_t first = begin; first < end; first += kQueryBlockTokens) {
        blocks.push_back(
            Block(begin, first, std::min(first + kQueryBlockTokens, end)));
      }
      for (; begin < end; ++begin) positions_.push_back(begin);
    }
    return at::cat(blocks, 2).permute({2, 0, 1, 3});
  }

 private:
  UnitHeads HeadsOf() const {
    const std::vector<int64_t>& list = rule_.units[static_cast<size_t>(unit_)];
    const at::Tensor index = Positions(list, inputs_.query.device());
    const int64_t kv_heads = inputs_.key.size(2);
    const auto unit_heads = [&](const at::Tensor& heads) {
      return heads.defined()
                 ? heads[batch_].index_select(1, index).permute({1, 0, 2})
                 : at::Tensor();
    };
    UnitHeads heads;
    heads.query = inputs_.query[batch_]
                      .view({length_, kv_heads, -1, inputs_.query.size(3)})
                      .index_select(1, index)
                      .permute({1, 2, 0, 3});
    heads.key = unit_heads(inputs_.key);
    heads.value = unit_heads(inputs_.value);
    if (inputs_.near_key_tokens > 0)
      heads.near_key = unit_heads(inputs_.near_key);
    if (inputs_.near_value_tokens > 0) {
      heads.near_value = unit_heads(inputs_.near_value);
    }
    return heads;
  }

  // Returns the quantization errors [T], rounded to one byte as in a cache.
  // Empty if nothing is coded.
  std::vector<float> ErrorsOf(const at::Tensor& squares) const {
    if (!squares.defined()) return {};
    const at::Tensor index =
        Positions(rule_.units[static_cast<size_t>(unit_)], squares.device());
    std::vector<float> errors =
        Floats(squares[batch_].index_select(1, index).sum(1).sqrt());
    for (float& error : errors) {
      error = base::DecodeError(base::EncodeError(error));
    }
    return errors;
  }

  // Computes the attention of queries [first, end). Each query sees the slots
  // that the last eviction kept, and the tokens from `begin` to its own.
  at::Tensor Block(int64_t begin, int64_t first, int64_t end) {
    std::vector<int64_t> seen = positions_;
    for (int64_t p = begin; p < end; ++p) seen.push_back(p);
    const at::Device device = inputs_.query.device();
    const at::Tensor slots = Positions(seen, device);
    const at::Tensor own = at::arange(first, end, slots.options()).unsqueeze(1);
    const int64_t rows = end - first;
    const int64_t kv_heads = heads_.key.size(0);
    const int64_t share = heads_.query.size(1);
    const std::vector<int64_t> by_query = {kv_heads, share, rows,
                                           slots.size(0)};
    // The kept slots come first. Tokens from `begin` on follow, so slot =
    // position + to_slot.
    const int64_t to_slot = static_cast<int64_t>(positions_.size()) - begin;
    const at::Tensor query =
        Moved(heads_.query.slice(2, first, end), own.squeeze(1),
              own.squeeze(1) + to_slot)
            .reshape({kv_heads, share * rows, heads_.query.size(3)});
    const auto held = [&slots](const at::Tensor& heads) {
      return heads.index_select(1, slots);
    };
    const at::Tensor places = at::arange(slots.size(0), slots.options());
    const auto held_key = [&](const at::Tensor& heads) {
      return Moved(held(heads), slots, places).transpose(1, 2);
    };
    const auto near = [&](int64_t tokens) {
      return slots.unsqueeze(0).gt(own - tokens);
    };
    at::Tensor scores = at::bmm(query, held_key(heads_.key)).view(by_query);
    if (heads_.near_key.defined()) {
      scores = at::where(
          near(inputs_.near_key_tokens),
          at::bmm(query, held_key(heads_.near_key)).view(by_query), scores);
    }
    const at::Tensor weights =
        at::softmax(SoftCap(scores, inputs_.score_cap)
                        .masked_fill(slots.unsqueeze(0).gt(own),
                                     -std::numeric_limits<float>::infinity()),
                    -1);
    AddMass(weights, first, end);
    const std::vector<int64_t> by_row = {kv_heads, share * rows, slots.size(0)};
    at::Tensor mixed;
    if (heads_.near_value.defined()) {
      const at::Tensor exact = near(inputs_.near_value_tokens);
      mixed = at::bmm((weights * exact).view(by_row), held(heads_.near_value)) +
              at::bmm((weights * exact.logical_not()).view(by_row),
                      held(heads_.value));
    } else {
      mixed = at::bmm(weights.view(by_row), held(heads_.value));
    }
    return mixed.view({kv_heads, share, rows, -1});
  }

  // Rotates `heads` from the positions `from` to the positions `to` if the rule
  // has rolling positions. EvictionInputs::move describes `heads`.
  at::Tensor Moved(const at::Tensor& heads, const at::Tensor& from,
                   const at::Tensor& to) const {
    if (!rule_.rolling) return heads;
    return eviction_.move(heads, rule_.units[static_cast<size_t>(unit_)], from,
                          to);
  }

  void AddMass(const at::Tensor& weights, int64_t first, int64_t end) {
    int64_t counted = first;
    if (first < prompt_) {
      counted = schedule_.FirstCounted(first, std::min(end, prompt_));
    }
    const std::vector<float> mass = Floats(
        weights.slice(2, counted - first).sum(c10::IntArrayRef{0, 1, 2}));
    for (size_t i = 0; i < mass.size(); ++i) mass_[i] += mass[i];
  }

  void Evict(int64_t length) {
    std::vector<float> key_error;
    std::vector<float> value_error;
    std::vector<float> mass = mass_;
    for (size_t i = 0; i < positions_.size(); ++i) {
      const auto position = static_cast<size_t>(positions_[i]);
      if (!key_error_.empty()) key_error.push_back(key_error_[position]);
      if (!value_error_.empty()) value_error.push_back(value_error_[position]);
      if (eviction_.rule->random_seed.has_value())
        mass[i] = RandomScore(position);
    }
    plan::ResolvedEviction rule = rule_;
    if (eviction_.rule->random_seed.has_value()) rule.lambda = 1;
    const std::vector<int64_t> kept = ChooseSlots(
        rule,
        {.mass = mass, .key_error = key_error, .value_error = value_error},
        schedule_.kept_slots());
    for (size_t i = 0; i < kept.size(); ++i) {
      const auto from = static_cast<size_t>(kept[i]);
      positions_[i] = positions_[from];
      mass_[i] = mass_[from] * rule_.decay;
    }
    positions_.resize(kept.size());
    mass_.resize(kept.size());
    if (eviction_.on_kept) {
      eviction_.on_kept(batch_, unit_, length, positions_);
    }
  }

  // Returns the random score of a token, which is the same at every eviction.
  float RandomScore(uint64_t position) const {
    const base::PhiloxCounter drawn = base::Philox4x32(
        base::PhiloxKeyFromSeed(*eviction_.rule->random_seed),
        base::PhiloxCounterOf(position, static_cast<uint64_t>(unit_)));
    return static_cast<float>(drawn[0] >> 8);
  }

  const AttentionInputs& inputs_;
  const EvictionInputs& eviction_;
  const plan::ResolvedEviction& rule_;
  const int64_t batch_;
  const int64_t unit_;
  const int64_t length_;
  const int64_t prompt_;
  const cache::EvictionSchedule schedule_;
  const UnitHeads heads_;
  const std::vector<float> key_error_;    // [T]
  const std::vector<float> value_error_;  // [T]
  std::vector<int64_t> positions_;        // positions of the held slots
  // The attention that the held slots have received so far, followed by that of
  // the tokens since the last eviction.
  std::vector<float> mass_;
};

}  // namespace

at::Tensor EvictingAttention(const AttentionInputs& inputs,
                             const EvictionInputs& eviction) {
  KVASIR_CHECK(inputs.sliding_window == 0);
  KVASIR_CHECK(!eviction.rule->layer.slots.rolling || eviction.move);
  const int64_t batch = inputs.query.size(0);
  const int64_t length = inputs.query.size(1);
  const auto& units = eviction.rule->layer.slots.units;
  // place[head] is the position of the head after the heads of all units are
  // concatenated.
  std::vector<int64_t> place(static_cast<size_t>(inputs.key.size(2)));
  int64_t next = 0;
  for (const std::vector<int64_t>& unit : units) {
    for (const int64_t head : unit) place[static_cast<size_t>(head)] = next++;
  }
  const at::Tensor order = Positions(place, inputs.query.device());
  std::vector<at::Tensor> sequences;
  for (int64_t b = 0; b < batch; ++b) {
    std::vector<at::Tensor> heads;
    for (size_t u = 0; u < units.size(); ++u) {
      heads.push_back(
          UnitRun(inputs, eviction, b, static_cast<int64_t>(u)).Run());
    }
    sequences.push_back(at::cat(heads, 1).index_select(1, order));
  }
  return at::stack(sequences).reshape(
      {batch, length, inputs.query.size(2), inputs.value.size(3)});
}

}  // namespace kvasir::compress
