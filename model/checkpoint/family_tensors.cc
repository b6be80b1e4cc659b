#include "model/checkpoint/family_tensors.h"

#include <array>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "model/checkpoint/plan_tensors.h"

namespace kvasir::model {
namespace {

// Selects the rows of a stored tensor that belong to a canonical tensor.
enum class Pick {
  kAll,
  // The stored tensor has, for each head, the rows of its query, of its key and
  // of its value.
  kQuery,
  kKey,
  kValue,
  // The stored tensor has the rows of all queries, then of all keys, then of
  // all values.
  kQueries,
  kKeys,
  kValues,
  // The stored tensor has the rows of gate_proj, then those of up_proj.
  kGate,
  kUp,
  kAfterUnusedRows,
};

// A module's name as the family stores it, and its canonical name. A tensor's
// name consists of the module's name and then "weight" or "bias". For modules
// of `in_layer`, it also begins with the family's `layers` prefix, the layer's
// number and a point. A '#' in both names stands for the same number, that of
// an expert.
struct NameRow {
  std::string_view stored;
  std::string_view ours;
  Pick pick = Pick::kAll;
};

struct FamilyNames {
  std::string_view model_type;
  std::string_view layers;        // as stored
  std::string_view short_layers;  // the prefix in older files; may be empty
  std::span<const NameRow> in_layer;
  std::span<const NameRow> outer;
};

constexpr std::string_view kOurLayers = "model.layers.";

constexpr std::array<NameRow, 8> kNeoxLayer = {{
    {"input_layernorm.", "input_layernorm."},
    {"attention.query_key_value.", "self_attn.q_proj.", Pick::kQuery},
    {"attention.query_key_value.", "self_attn.k_proj.", Pick::kKey},
    {"attention.query_key_value.", "self_attn.v_proj.", Pick::kValue},
    {"attention.dense.", "self_attn.o_proj."},
    {"post_attention_layernorm.", "post_attention_layernorm."},
    {"mlp.dense_h_to_4h.", "mlp.up_proj."},
    {"mlp.dense_4h_to_h.", "mlp.down_proj."},
}};
constexpr std::array<NameRow, 3> kNeoxOuter = {{
    {"gpt_neox.embed_in.", "model.embed_tokens."},
    {"gpt_neox.final_layer_norm.", "model.norm."},
    {"embed_out.", "lm_head."},
}};

constexpr std::array<NameRow, 8> kOptLayer = {{
    {"self_attn_layer_norm.", "input_layernorm."},
    {"self_attn.q_proj.", "self_attn.q_proj."},
    {"self_attn.k_proj.", "self_attn.k_proj."},
    {"self_attn.v_proj.", "self_attn.v_proj."},
    {"self_attn.out_proj.", "self_attn.o_proj."},
    {"final_layer_norm.", "post_attention_layernorm."},
    {"fc1.", "mlp.up_proj."},
    {"fc2.", "mlp.down_proj."},
}};
// In checkpoints without an output head, names lack the first "model.".
constexpr std::array<NameRow, 6> kOptOuter = {{
    {"model.decoder.embed_tokens.", "model.embed_tokens."},
    {"model.decoder.embed_positions.", "model.embed_positions.",
     Pick::kAfterUnusedRows},
    {"model.decoder.final_layer_norm.", "model.norm."},
    {"decoder.embed_tokens.", "model.embed_tokens."},
    {"decoder.embed_positions.", "model.embed_positions.",
     Pick::kAfterUnusedRows},
    {"decoder.final_layer_norm.", "model.norm."},
}};

constexpr std::array<NameRow, 4> kMixtralLayer = {{
    {"block_sparse_moe.gate.", "mlp.gate."},
    {"block_sparse_moe.experts.#.w1.", "mlp.experts.#.gate_proj."},
    {"block_sparse_moe.experts.#.w3.", "mlp.experts.#.up_proj."},
    {"block_sparse_moe.experts.#.w2.", "mlp.experts.#.down_proj."},
}};

constexpr std::array<NameRow, 2> kOlmo2Layer = {{
    {"post_attention_layernorm.", "self_attn.output_norm."},
    {"post_feedforward_layernorm.", "mlp.output_norm."},
}};

constexpr std::array<NameRow, 3> kGemmaLayer = {{
    {"post_attention_layernorm.", "self_attn.output_norm."},
    {"pre_feedforward_layernorm.", "post_attention_layernorm."},
    {"post_feedforward_layernorm.", "mlp.output_norm."},
}};

constexpr std::array<NameRow, 5> kPhi3Layer = {{
    {"self_attn.qkv_proj.", "self_attn.q_proj.", Pick::kQueries},
    {"self_attn.qkv_proj.", "self_attn.k_proj.", Pick::kKeys},
    {"self_attn.qkv_proj.", "self_attn.v_proj.", Pick::kValues},
    {"mlp.gate_up_proj.", "mlp.gate_proj.", Pick::kGate},
    {"mlp.gate_up_proj.", "mlp.up_proj.", Pick::kUp},
}};

// Modules that are not in a family's table are stored under Llama's names.
constexpr std::array<FamilyNames, 7> kFamilies = {{
    {"gpt_neox", "gpt_neox.layers.", {}, kNeoxLayer, kNeoxOuter},
    {"opt", "model.decoder.layers.", "decoder.layers.", kOptLayer, kOptOuter},
    {"olmo2", kOurLayers, {}, kOlmo2Layer, {}},
    {"phi3", kOurLayers, {}, kPhi3Layer, {}},
    {"gemma2", kOurLayers, {}, kGemmaLayer, {}},
    {"gemma3_text", kOurLayers, {}, kGemmaLayer, {}},
    {"mixtral", kOurLayers, {}, kMixtralLayer, {}},
}};

const FamilyNames* NamesOf(const DecoderSpec& spec) {
  for (const FamilyNames& names : kFamilies) {
    if (names.model_type == spec.model_type) return &names;
  }
  return nullptr;
}

// The parts of a layer's tensor name that follow its prefix.
struct InLayer {
  std::string_view number;  // the layer's number and a point, like "17."
  std::string_view rest;
};
std::optional<InLayer> SplitLayer(std::string_view prefix,
                                  std::string_view name) {
  if (prefix.empty() || !name.starts_with(prefix)) return std::nullopt;
  name.remove_prefix(prefix.size());
  const size_t digits = name.find_first_not_of("0123456789");
  if (digits == 0 || digits == name.npos || name[digits] != '.') {
    return std::nullopt;
  }
  return InLayer{name.substr(0, digits + 1), name.substr(digits + 1)};
}

// Removes `text` from the beginning of `name`, if it is there.
bool Remove(std::string_view text, std::string_view* name) {
  if (!name->starts_with(text)) return false;
  name->remove_prefix(text.size());
  return true;
}

// If `name` is the module `from` and then "weight" or "bias", returns the name
// with the module `to` instead. Both modules may have a '#' (NameRow).
std::optional<std::string> WithModule(std::string_view from,
                                      std::string_view to,
                                      std::string_view name) {
  std::string_view number;
  if (const size_t mark = from.find('#'); mark != from.npos) {
    if (!Remove(from.substr(0, mark), &name)) return std::nullopt;
    number = name.substr(0, name.find_first_not_of("0123456789"));
    if (number.empty()) return std::nullopt;
    name.remove_prefix(number.size());
    from.remove_prefix(mark + 1);
  }
  if (!Remove(from, &name)) return std::nullopt;
  if (name != "weight" && name != "bias") return std::nullopt;
  if (number.empty()) return absl::StrFormat("%s%s", to, name);
  const size_t mark = to.find('#');
  return absl::StrFormat("%s%s%s%s", to.substr(0, mark), number,
                         to.substr(mark + 1), name);
}

struct Picked {
  RowBlocks rows;
  int64_t num_rows = 0;
  int64_t stored_rows = 0;
};

Picked RowsOf(const DecoderSpec& spec, Pick pick) {
  const int64_t d = spec.head_dim;
  const int64_t q = spec.num_heads * d;
  const int64_t kv = spec.num_kv_heads * d;
  const int64_t f = spec.intermediate_size;
  const auto run = [](int64_t first, int64_t count, int64_t stored) {
    return Picked{{first, count, 0}, count, stored};
  };
  switch (pick) {
    case Pick::kAll:
      break;
    case Pick::kQuery:
      return {{0, d, 3 * d}, q, 3 * q};
    case Pick::kKey:
      return {{d, d, 3 * d}, q, 3 * q};
    case Pick::kValue:
      return {{2 * d, d, 3 * d}, q, 3 * q};
    case Pick::kQueries:
      return run(0, q, q + 2 * kv);
    case Pick::kKeys:
      return run(q, kv, q + 2 * kv);
    case Pick::kValues:
      return run(q + kv, kv, q + 2 * kv);
    case Pick::kGate:
      return run(0, f, 2 * f);
    case Pick::kUp:
      return run(f, f, 2 * f);
    case Pick::kAfterUnusedRows:
      return run(kUnusedOptPositions, spec.max_position_embeddings,
                 kUnusedOptPositions + spec.max_position_embeddings);
  }
  return {};
}

struct Renamed {
  std::string name;
  Pick pick = Pick::kAll;
};

// Returns the canonical names of a stored tensor: several for a fused one, and
// none for a tensor that is not in the family's table.
std::vector<Renamed> Rename(const FamilyNames& names, std::string_view stored) {
  std::vector<Renamed> ours;
  auto layer = SplitLayer(names.layers, stored);
  if (!layer.has_value()) layer = SplitLayer(names.short_layers, stored);
  if (layer.has_value()) {
    for (const NameRow& row : names.in_layer) {
      const auto rest = WithModule(row.stored, row.ours, layer->rest);
      if (!rest.has_value()) continue;
      ours.push_back(
          {absl::StrFormat("%s%s%s", kOurLayers, layer->number, *rest),
           row.pick});
    }
    return ours;
  }
  for (const NameRow& row : names.outer) {
    auto renamed = WithModule(row.stored, row.ours, stored);
    if (!renamed.has_value()) continue;
    ours.push_back({*std::move(renamed), row.pick});
  }
  return ours;
}

absl::StatusOr<std::vector<TensorView>> ViewsOf(
    const DecoderSpec& spec, const FamilyNames& names,
    const TensorStore::Entry& entry) {
  const TensorInfo& info = *entry.info;
  std::vector<TensorView> views;
  for (Renamed& renamed : Rename(names, info.name)) {
    const Picked picked = RowsOf(spec, renamed.pick);
    if (!picked.rows.all()) {
      if (info.shape.empty() || info.shape[0] != picked.stored_rows) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "%s: tensor %s must have %d rows, but its shape is %s",
            entry.file->path(), info.name, picked.stored_rows,
            ShapeText(info.shape)));
      }
      if (!IsWeightType(info.type)) {
        return absl::InvalidArgumentError(absl::StrFormat(
            "%s: tensor %s has the type %s, but must have F32, F16 or BF16",
            entry.file->path(), info.name, TensorTypeName(info.type)));
      }
    }
    views.push_back({std::move(renamed.name), picked.rows, picked.num_rows});
  }
  if (views.empty()) views.push_back({info.name, {}, 0});
  return views;
}

}  // namespace

StoredTensor StoredTensorOf(const DecoderSpec& spec, std::string_view name) {
  const FamilyNames* const names = NamesOf(spec);
  const auto found = [&](const NameRow& row, std::string stored) {
    const Picked picked = RowsOf(spec, row.pick);
    return StoredTensor{std::move(stored), picked.rows, picked.num_rows};
  };
  if (names != nullptr) {
    if (const auto layer = SplitLayer(kOurLayers, name); layer.has_value()) {
      for (const NameRow& row : names->in_layer) {
        const auto rest = WithModule(row.ours, row.stored, layer->rest);
        if (!rest.has_value()) continue;
        return found(row, absl::StrFormat("%s%s%s", names->layers,
                                          layer->number, *rest));
      }
    }
    for (const NameRow& row : names->outer) {
      auto stored = WithModule(row.ours, row.stored, name);
      if (stored.has_value()) return found(row, *std::move(stored));
    }
  }
  return {std::string(name), {}, 0};
}

std::vector<std::string> OurNamesOf(const DecoderSpec& spec,
                                    std::string_view stored) {
  std::vector<std::string> ours;
  if (const FamilyNames* const names = NamesOf(spec); names != nullptr) {
    for (Renamed& renamed : Rename(*names, stored)) {
      ours.push_back(std::move(renamed.name));
    }
  }
  if (ours.empty()) ours.emplace_back(stored);
  return ours;
}

absl::Status UseOurNames(const DecoderSpec& spec, TensorStore* store) {
  const FamilyNames* const names = NamesOf(spec);
  if (names == nullptr) return absl::OkStatus();
  return store->Rename([&](const TensorStore::Entry& entry) {
    return ViewsOf(spec, *names, entry);
  });
}

}  // namespace kvasir::model
