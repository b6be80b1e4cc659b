#include "plan/artifact_tensors.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace kvasir::plan {
namespace {

// Collects the attention tensors of one layer.
class Lister {
 public:
  Lister(const ResolvedAttention& attention, const AttentionShape& shape)
      : attention_(attention), shape_(shape) {}

  AttentionTensors List() {
    // Lists the projections in the order of use.
    Query();
    for (const ResolvedPart& part : attention_.key.parts) AddPart(part);
    for (const ResolvedPart& part : attention_.value.parts) AddPart(part);
    Output();
    return std::move(out_);
  }

 private:
  int64_t KvHeadOf(int64_t query_head) const {
    return query_head / (shape_.num_heads / shape_.num_kv_heads);
  }

  void Query() {
    const std::vector<ResolvedPart>& parts = attention_.key.parts;
    const bool any_folded =
        std::any_of(parts.begin(), parts.end(),
                    [](const ResolvedPart& part) { return part.folded; });
    int64_t rows = 0;
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
      int64_t own = any_folded ? 0 : shape_.head_dim;
      for (const ResolvedPart& part : parts) {
        if (!any_folded) break;
        const ResolvedLatent& latent = part.LatentOf(KvHeadOf(head));
        own += part.folded ? latent.channels : latent.head_dims;
      }
      out_.query_rows.push_back(own);
      rows += own;
    }
    Add("self_attn.q_proj.weight", {rows, shape_.hidden_size});
    if (shape_.qkv_bias) Add("self_attn.q_proj.bias", {rows});
  }

  void Output() {
    int64_t columns = 0;
    for (int64_t head = 0; head < shape_.num_heads; ++head) {
      int64_t own = 0;
      for (const ResolvedPart& part : attention_.value.parts) {
        own += part.folded ? part.LatentOf(KvHeadOf(head)).channels
                           : shape_.head_dim;
      }
      out_.output_columns.push_back(own);
      columns += own;
    }
    out_.output_bias = shape_.o_bias;
    for (const ResolvedPart& part : attention_.value.parts) {
      const bool constant = shape_.qkv_bias || part.mean;
      out_.output_bias =
          out_.output_bias || (part.space == Space::kLowRank && constant);
    }
    Add("self_attn.o_proj.weight", {shape_.hidden_size, columns});
    if (out_.output_bias) Add("self_attn.o_proj.bias", {shape_.hidden_size});
  }

  void Add(std::string name, std::vector<int64_t> shape,
           bool f32_only = false) {
    out_.tensors.push_back({std::move(name), std::move(shape), f32_only});
  }

  void AddPart(const ResolvedPart& part) {
    const auto add = [&](absl::string_view name, std::vector<int64_t> dims,
                         bool f32_only = false) {
      Add(absl::StrCat(part.prefix, ".", name), std::move(dims), f32_only);
    };
    if (!part.stores_latents()) {
      if (!part.folded) AddLifts(part);
      return;
    }
    const int64_t m = shape_.hidden_size;
    const int64_t all_dims = shape_.num_kv_heads * shape_.head_dim;
    const int64_t channels = part.channels();
    switch (part.space) {
      case Space::kFull:
        add("weight", {all_dims, m});
        if (shape_.qkv_bias) add("bias", {all_dims});
        if (part.transform == Transform::kBasisStatic) {
          add("basis.weight", {channels, all_dims});
          if (part.mean) add("basis.mean", {all_dims});
        }
        break;
      case Space::kRopePairs:
        add("weight", {channels, m});
        if (shape_.qkv_bias) add("bias", {channels});
        break;
      case Space::kLowRank:
      case Space::kRopeLowRank:
        add("down.weight", {channels, m});
        if (part.latent_bias) add("down.bias", {channels});
        if (!part.folded) AddLifts(part);
    }
    if (part.range == RangeKind::kChannel) {
      add("range.min", {channels}, /*f32_only=*/true);
      add("range.scale", {channels}, /*f32_only=*/true);
    }
  }

  void AddLifts(const ResolvedPart& part) {
    const bool low_rank = part.space == Space::kLowRank;
    for (size_t g = 0; g < part.latents.size(); ++g) {
      const ResolvedLatent& latent = part.latents[g];
      const auto heads = static_cast<int64_t>(latent.heads.size());
      std::string name =
          absl::StrCat(part.prefix, ".",
                       LiftName(part.lift_prefix, static_cast<int64_t>(g)));
      if (low_rank) {
        Add(std::move(name), {heads * latent.head_dims, latent.channels});
      } else {
        Add(std::move(name), {heads, 2, latent.channels / 2});
      }
    }
    if (low_rank && part.rebuilt && (shape_.qkv_bias || part.mean)) {
      Add(absl::StrCat(part.prefix, ".", part.lift_prefix, ".bias"),
          {shape_.num_kv_heads * static_cast<int64_t>(part.dims.size())});
    }
  }

  const ResolvedAttention& attention_;
  const AttentionShape& shape_;
  AttentionTensors out_;
};

}  // namespace

std::string LayerTensorName(int64_t layer, absl::string_view name) {
  return absl::StrCat("model.layers.", layer, ".", name);
}

std::string PartPrefix(absl::string_view projection, int part, int num_parts) {
  std::string prefix(projection);
  if (num_parts > 1) absl::StrAppend(&prefix, ".part", part);
  return prefix;
}

std::string LiftName(absl::string_view prefix, int64_t group) {
  return absl::StrCat(prefix, ".", group, ".weight");
}

absl::StatusOr<AttentionTensors> TensorsOf(const ResolvedAttention& attention,
                                           const AttentionShape& shape,
                                           int64_t layer) {
  for (const ResolvedPart& part : attention.key.parts) {
    if (part.space != Space::kLowRank || part.stored != RopeSide::kAfter) {
      continue;
    }
    return absl::UnimplementedError(
        absl::StrCat("layer ", layer, ": ", part.prefix,
                     ": no checkpoint can hold the tensors of keys in a "
                     "low_rank space that are stored POST_ROPE: use a "
                     "full space with basis_static instead"));
  }
  return Lister(attention, shape).List();
}

std::vector<RequiredTensor> PlainAttentionTensors(const AttentionShape& shape) {
  const int64_t m = shape.hidden_size;
  const int64_t q = shape.num_heads * shape.head_dim;
  const int64_t kv = shape.num_kv_heads * shape.head_dim;
  std::vector<RequiredTensor> tensors;
  const auto project = [&](absl::string_view name, int64_t rows) {
    tensors.push_back({absl::StrCat("self_attn.", name, ".weight"), {rows, m}});
    if (!shape.qkv_bias) return;
    tensors.push_back({absl::StrCat("self_attn.", name, ".bias"), {rows}});
  };
  project("q_proj", q);
  project("k_proj", kv);
  project("v_proj", kv);
  tensors.push_back({"self_attn.o_proj.weight", {m, q}});
  if (shape.o_bias) tensors.push_back({"self_attn.o_proj.bias", {m}});
  return tensors;
}

}  // namespace kvasir::plan
