#include "plan/presets.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "plan/normal_levels.h"
#include "plan/plan.h"

namespace kvasir::plan {
namespace {

using kvasir::v1::Codec;
using kvasir::v1::KvPlan;
using kvasir::v1::LayerPlan;
using kvasir::v1::Part;

Codec Numbers() {
  Codec codec;
  codec.set_dtype(kvasir::v1::BF16);
  return codec;
}

Codec Codes(uint32_t bits) {
  Codec codec;
  codec.mutable_bits()->add_schedule(bits);
  codec.mutable_per_token();
  codec.set_param_dtype(kvasir::v1::F16);
  return codec;
}

Codec RotatedCodes(uint32_t bits) {
  Codec codec;
  codec.mutable_bits()->add_schedule(bits);
  for (const double level : LloydMaxLevels(bits)) {
    codec.mutable_per_token_norm()->add_levels(level);
  }
  codec.set_param_dtype(kvasir::v1::F16);
  codec.mutable_hadamard_online();
  return codec;
}

// Returns a codec with codes of `bits` bits. With 0 bits, numbers are
// stored unquantized.
Codec CodecOf(uint32_t bits) { return bits == 0 ? Numbers() : Codes(bits); }

Codec FusedCodec(uint32_t bits) {
  Codec codec = CodecOf(bits);
  if (bits > 0) codec.mutable_hadamard_fused();
  return codec;
}

Part Full(kvasir::v1::Stored stored, const Codec& codec) {
  Part part;
  part.mutable_full();
  part.set_stored(stored);
  *part.mutable_codec() = codec;
  return part;
}

// Returns a low-rank part. Each group of `share` heads has a latent with half
// as many numbers as the heads have dimensions.
Part HalfRank(const AttentionShape& shape, int64_t share, const Codec& codec) {
  Part part;
  for (int64_t head = 0; head < shape.num_kv_heads; head += share) {
    auto* group = part.mutable_low_rank()->add_groups();
    for (int64_t h = head; h < head + share; ++h) {
      group->add_heads(static_cast<uint32_t>(h));
    }
    group->set_rank(static_cast<uint32_t>(share * shape.head_dim / 2));
  }
  *part.mutable_codec() = codec;
  return part;
}

// Returns a HalfRank part for values. As in the planners, its lift is folded
// into o_proj if this takes fewer weights than a separate lift.
Part HalfRankValues(const AttentionShape& shape, int64_t share,
                    const Codec& codec) {
  Part part = HalfRank(shape, share, codec);
  part.set_stored(kvasir::v1::NO_ROPE);
  const int64_t rank = share * shape.head_dim / 2;
  const int64_t folded = shape.num_heads * rank * shape.hidden_size;
  const int64_t at_runtime =
      shape.num_heads * shape.head_dim * shape.hidden_size +
      shape.num_kv_heads * shape.head_dim * rank;
  if (folded < at_runtime) {
    part.add_uses()->mutable_fold();
  } else {
    part.add_uses()->mutable_at_runtime();
  }
  return part;
}

// A plan of whole keys and values. The first tokens and the latest ones may
// also be kept unquantized. They receive most attention, so errors of their
// codes would cost most quality.
struct WholePlan {
  Codec key;
  Codec value;
  uint32_t sinks = 0;
  uint32_t window = 0;
};

LayerPlan Whole(bool rotates, const WholePlan& plan) {
  LayerPlan layer;
  layer.set_exact_sinks(plan.sinks);
  layer.mutable_key()->set_exact_window(plan.window);
  layer.mutable_value()->set_exact_window(plan.window);
  *layer.mutable_key()->add_parts() =
      Full(rotates ? kvasir::v1::POST_ROPE : kvasir::v1::NO_ROPE, plan.key);
  *layer.mutable_value()->add_parts() = Full(kvasir::v1::NO_ROPE, plan.value);
  return layer;
}

LayerPlan Palu(const AttentionShape& shape, int64_t share, uint32_t bits) {
  LayerPlan layer;
  Part key = HalfRank(shape, share, FusedCodec(bits));
  key.set_stored(kvasir::v1::PRE_ROPE);
  key.add_uses()->mutable_reconstruct();
  *layer.mutable_key()->add_parts() = std::move(key);
  *layer.mutable_value()->add_parts() =
      HalfRankValues(shape, share, FusedCodec(bits));
  return layer;
}

// Each head keeps one of every two neighbouring RoPE pairs; which one depends
// on the head.
LayerPlan Rap(const AttentionShape& shape, uint32_t bits) {
  LayerPlan layer;
  Part key;
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    auto* kept = key.mutable_rope_pairs()->add_per_head();
    for (int64_t i = 0; i < shape.head_dim / 4; ++i) {
      const int64_t pair = 2 * i + (i * (head + 1) / 2) % 2;
      kept->add_pair_indices(static_cast<uint32_t>(pair));
    }
  }
  key.set_stored(kvasir::v1::POST_ROPE);
  key.add_uses()->mutable_fold();
  *key.mutable_codec() = CodecOf(bits);
  *layer.mutable_key()->add_parts() = std::move(key);
  *layer.mutable_value()->add_parts() =
      HalfRankValues(shape, 1, FusedCodec(bits));
  return layer;
}

LayerPlan Commuting(const AttentionShape& shape) {
  LayerPlan layer;
  constexpr int64_t kShare = 4;  // the number of heads in each group
  Part key;
  for (int64_t head = 0; head < shape.num_kv_heads; head += kShare) {
    auto* group = key.mutable_rope_low_rank()->add_groups();
    for (int64_t h = head; h < head + kShare; ++h) {
      group->add_heads(static_cast<uint32_t>(h));
    }
    for (int64_t pair = 0; pair < shape.head_dim / 2; ++pair) {
      group->add_pairs(static_cast<uint32_t>(pair));
      group->add_rank_per_pair(kShare / 2);
    }
  }
  key.set_stored(kvasir::v1::POST_ROPE);
  key.add_uses()->mutable_at_runtime();
  *key.mutable_codec() = Numbers();
  *layer.mutable_key()->add_parts() = std::move(key);
  *layer.mutable_value()->add_parts() = HalfRankValues(shape, 1, Numbers());
  return layer;
}

// Keys are stored in a basis over all heads, and values as 4-bit codes.
LayerPlan Svdq(const AttentionShape& shape,
               const std::vector<uint32_t>& schedule) {
  LayerPlan layer;
  Part key;
  auto* group = key.mutable_low_rank()->add_groups();
  for (int64_t head = 0; head < shape.num_kv_heads; ++head) {
    group->add_heads(static_cast<uint32_t>(head));
  }
  group->set_rank(static_cast<uint32_t>(
      std::min(shape.num_kv_heads * shape.head_dim, shape.hidden_size)));
  key.add_uses()->mutable_reconstruct();
  key.set_stored(kvasir::v1::PRE_ROPE);
  key.set_latent_bias(true);
  key.set_mean(true);
  Codec& codec = *key.mutable_codec();
  codec.mutable_bits()->mutable_schedule()->Add(schedule.begin(),
                                                schedule.end());
  codec.mutable_channel_static();
  codec.mutable_basis_static();
  *layer.mutable_key()->add_parts() = std::move(key);
  *layer.mutable_value()->add_parts() = Full(kvasir::v1::NO_ROPE, Codes(4));
  return layer;
}

struct Entry {
  PlanPreset preset;
  std::function<LayerPlan(const AttentionShape&)> make;
  int64_t share = 1;  // heads in each group
  // If set, the plan stores full-rank keys and values like this, and `make` is
  // empty.
  std::optional<WholePlan> whole = std::nullopt;
};

constexpr double kDenseTarget = 1.25;
constexpr double kAbsorbedTarget = 1.3;
constexpr double kAbsorbedCodesTarget = 1.6;
constexpr double kRebuiltTarget = 1.5;

Entry PaluEntry(int64_t share, uint32_t bits) {
  Entry entry;
  entry.preset = {
      absl::StrCat("palu-50-g", share,
                   bits > 0 ? absl::StrCat("-", bits, "bit") : ""),
      absl::StrCat("Palu, half the numbers of groups of ", share,
                   share == 1 ? " head" : " heads",
                   bits > 0 ? absl::StrCat(", ", bits, " bits") : ", bf16",
                   "; keys rebuilt"),
      kRebuiltTarget};
  entry.make = [share, bits](const AttentionShape& shape) {
    return Palu(shape, share, bits);
  };
  entry.share = share;
  return entry;
}

Entry SvdqEntry(const std::vector<uint32_t>& schedule) {
  Entry entry;
  entry.preset = {
      absl::StrCat("svdq-", absl::StrJoin(schedule, "")),
      absl::StrCat("SVDq, key channels of ", absl::StrJoin(schedule, ","),
                   " bits; keys rebuilt, values 4 bits"),
      kRebuiltTarget};
  entry.make = [schedule](const AttentionShape& shape) {
    return Svdq(shape, schedule);
  };
  return entry;
}

Entry WholeEntry(const std::string& name, const std::string& text,
                 std::optional<double> target, const Codec& codec) {
  Entry entry;
  entry.preset = {name, absl::StrCat("whole keys and values, ", text), target,
                  /*any_checkpoint=*/true, /*auto_may_choose=*/true};
  entry.whole = {.key = codec, .value = codec};
  return entry;
}

// The bits of a rotated plan, and how many of the latest tokens stay exact. A
// plan of fewer bits keeps more of them, but they take bytes in every sequence:
// with 3 bits, a sequence takes fewer bytes than with 4 bits only if it is
// longer than about 700 tokens.
struct Rotated {
  uint32_t key_bits;
  uint32_t value_bits;
  uint32_t window;
};

Entry RotatedEntry(const std::string& name, const Rotated& plan,
                   const std::string& note = "") {
  constexpr uint32_t kSinks = 4;
  const std::string bits =
      plan.key_bits == plan.value_bits
          ? absl::StrCat(plan.key_bits, " bits")
          : absl::StrCat("keys ", plan.key_bits, " bits, values ",
                         plan.value_bits);
  Entry entry =
      WholeEntry(name,
                 absl::StrCat("rotated, ", bits, " and a length; the first ",
                              kSinks, " tokens and the latest ", plan.window,
                              " as they are", note),
                 std::nullopt, RotatedCodes(plan.key_bits));
  entry.whole->value = RotatedCodes(plan.value_bits);
  entry.whole->sinks = kSinks;
  entry.whole->window = plan.window;
  return entry;
}

// Entries of any checkpoint are sorted by descending bytes per token.
std::vector<Entry> MakeEntries() {
  std::vector<Entry> entries;
  const auto add = [&entries](PlanPreset preset, auto make, int64_t share) {
    entries.push_back({std::move(preset), make, share});
  };
  entries.push_back(WholeEntry(kDensePreset, "bf16", kDenseTarget, Numbers()));
  entries.push_back(WholeEntry("dense-8bit", "8 bits", std::nullopt, Codes(8)));
  entries.push_back(RotatedEntry(kRotatedPreset, {4, 4, 28}));
  entries.push_back(RotatedEntry("rotated-3bit", {3, 3, 60}));
  // Errors of keys cost more than errors of values.
  entries.push_back(RotatedEntry("rotated-k3v2", {3, 2, 124},
                                 "; answers may get worse, measure it first"));
  entries.back().preset.auto_may_choose = false;
  entries.push_back(
      RotatedEntry("rotated-2bit", {2, 2, 124},
                   "; answers get clearly worse than with rotated-k3v2"));
  entries.back().preset.auto_may_choose = false;
  add(
      {"rap-50", "RAP, half of each head's RoPE pairs, values of half rank",
       kAbsorbedTarget},
      [](const AttentionShape& shape) { return Rap(shape, 0); }, 1);
  add(
      {"rap-50-4bit", "the same in 4 bits", kAbsorbedCodesTarget},
      [](const AttentionShape& shape) { return Rap(shape, 4); }, 1);
  add(
      {"commuting-50", "low rank per RoPE pair over groups of 4 heads",
       kAbsorbedTarget},
      [](const AttentionShape& shape) { return Commuting(shape); }, 4);
  for (const int64_t share : {1, 2, 4}) entries.push_back(PaluEntry(share, 0));
  entries.push_back(PaluEntry(1, 4));
  for (const uint32_t bits : {4u, 3u, 2u}) {
    entries.push_back(PaluEntry(4, bits));
  }
  entries.push_back(SvdqEntry({8, 4, 4, 4, 2, 2, 0, 0}));
  entries.push_back(SvdqEntry({4, 4, 2, 2, 0, 0, 0, 0}));
  return entries;
}

const std::vector<Entry>& Entries() {
  static const auto* const kEntries = new std::vector<Entry>(MakeEntries());
  return *kEntries;
}

absl::StatusOr<const Entry*> Find(const std::string& name) {
  std::vector<std::string> names;
  for (const Entry& entry : Entries()) {
    if (entry.preset.name == name) return &entry;
    names.push_back(entry.preset.name);
  }
  return absl::NotFoundError(absl::StrCat("there is no preset plan \"", name,
                                          "\"; the preset plans are ",
                                          absl::StrJoin(names, ", ")));
}

}  // namespace

const std::vector<PlanPreset>& PlanPresets() {
  static const auto* const kPresets = [] {
    auto* presets = new std::vector<PlanPreset>();
    for (const Entry& entry : Entries()) presets->push_back(entry.preset);
    return presets;
  }();
  return *kPresets;
}

absl::StatusOr<PlanPreset> FindPlanPreset(const std::string& name) {
  KVASIR_ASSIGN_OR_RETURN(const Entry* const entry, Find(name));
  return entry->preset;
}

absl::StatusOr<KvPlan> MakePresetPlan(const std::string& name,
                                      const AttentionShape& shape) {
  KVASIR_ASSIGN_OR_RETURN(const Entry* const entry, Find(name));
  if (shape.num_kv_heads % entry->share != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "plan ", name, " needs a number of KV heads that is a multiple of ",
        entry->share, ", but the model has ", shape.num_kv_heads));
  }
  if (!entry->whole.has_value() &&
      (shape.rotary_dim != shape.head_dim || shape.head_dim % 4 != 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("plan ", name,
                     " needs a head_dim that is a multiple of 4 and that RoPE "
                     "rotates completely, but the model rotates ",
                     shape.rotary_dim, " of ", shape.head_dim, " dims"));
  }
  KvPlan plan;
  plan.set_schema_version(kPlanSchemaVersion);
  plan.set_method(name);
  for (int64_t layer = 0; layer < shape.num_layers(); ++layer) {
    *plan.add_layers() = entry->whole.has_value()
                             ? Whole(shape.num_pairs(layer) > 0, *entry->whole)
                             : entry->make(shape);
  }
  return plan;
}

}  // namespace kvasir::plan
