#include "cache/layout/layout.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "cache/layout/layer_layout.h"

namespace kvasir::cache {

namespace {

// True if equal tokens give equal cached bytes in all sequences, so that
// sequences may share pages.
bool Reusable(const plan::ResolvedSide& side) {
  return std::none_of(
      side.parts.begin(), side.parts.end(), [](const plan::ResolvedPart& part) {
        return part.transform == plan::Transform::kBasisSequence ||
               part.range == plan::RangeKind::kSequence;
      });
}

bool Reusable(const plan::ResolvedPlan& plan, int64_t layer) {
  const plan::ResolvedAttention& attention = plan.attention_of(layer);
  return !plan.layer(layer).eviction.has_value() && Reusable(attention.key) &&
         Reusable(attention.value);
}

// For each page group, the number of side pages of a sequence: the largest
// number that any arena of any rank needs.
absl::StatusOr<std::vector<int64_t>> SidePagesOfAnyRank(
    const plan::ResolvedPlan& plan, const PageFormat& format) {
  std::vector<int64_t> most(plan.page_groups.size());
  plan::TpShard shard = plan.shard;
  for (shard.rank = 0; shard.rank < shard.size; ++shard.rank) {
    KVASIR_ASSIGN_OR_RETURN(
        const plan::HeadRange kv_heads,
        plan::KvHeadsOfRank(shard, plan.shape.num_kv_heads));
    KVASIR_ASSIGN_OR_RETURN(const std::vector<LayerLayout> layers,
                            LayOutLayers(plan, format, kv_heads));
    for (const LayerLayout& layer : layers) {
      int64_t& of_group = most[static_cast<size_t>(layer.page_group.value())];
      of_group = std::max(of_group, layer.side_pages);
    }
  }
  return most;
}

absl::Status CheckFormat(const PageFormat& format) {
  const auto [tokens, granule] = format;
  if (tokens < 1 || tokens > kMaxPageTokens ||
      (tokens > kTileSlots && tokens % kTileSlots != 0)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "page_tokens must be 1 to ", kTileSlots, ", or a multiple of ",
        kTileSlots, " up to ", kMaxPageTokens, ", but is ", tokens));
  }
  if (granule < 0 || granule > kMaxGranuleBytes ||
      (granule & (granule - 1)) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("granule_bytes must be 0 or a power of two up to ",
                     kMaxGranuleBytes, ", but is ", granule));
  }
  return absl::OkStatus();
}

std::string Mebibytes(int64_t bytes) {
  const int64_t mebibytes = bytes >> 20;
  return absl::StrCat(
      bytes, " bytes",
      mebibytes > 0 ? absl::StrCat(" (", mebibytes, " MiB)") : "");
}

}  // namespace

absl::StatusOr<PageLayout> PageLayout::Create(const plan::ResolvedPlan& plan,
                                              const PageFormat& format) {
  KVASIR_RETURN_IF_ERROR(CheckFormat(format));
  const int64_t page_tokens = format.page_tokens;
  PageLayout layout;
  layout.format_ = format;
  layout.shard_ = plan.shard;
  layout.kv_heads_ = plan.kv_heads;
  layout.dense_bf16_bytes_ = 2 * plan.num_layers() * plan.kv_heads.count *
                             plan.shape.head_dim *
                             plan::DataTypeBytes(kvasir::v1::BF16);
  for (const plan::ResolvedPageGroup& from : plan.page_groups) {
    PageGroupLayout& group = layout.groups_.emplace_back();
    group.id = PageGroupId(static_cast<int32_t>(layout.groups_.size()) - 1);
    group.sliding_window = from.sliding_window;
    group.eviction = from.eviction;
    group.layers = from.layers;
  }
  KVASIR_ASSIGN_OR_RETURN(layout.layers_,
                          LayOutLayers(plan, format, plan.kv_heads));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int64_t> side_pages,
                          SidePagesOfAnyRank(plan, format));
  int64_t page_id_bytes = 0;
  for (int64_t l = 0; l < plan.num_layers(); ++l) {
    const LayerLayout& layer = layout.layer(l);
    layout.prefix_reusable_ = layout.prefix_reusable_ && Reusable(plan, l);
    PageGroupLayout& group =
        layout.groups_[static_cast<size_t>(layer.page_group.value())];
    group.page_bytes += layer.page_bytes;
    group.payload_bytes += layer.payload_bytes;
    group.side_pages_per_sequence =
        side_pages[static_cast<size_t>(layer.page_group.value())];
    group.side_payload_bytes += layer.sequence_bytes;
    page_id_bytes += layer.page_bytes;
    if (page_id_bytes > kMaxPageIdBytes ||
        group.side_pages_per_sequence > kMaxPageIdBytes / group.page_bytes) {
      return absl::InvalidArgumentError(
          page_id_bytes > kMaxPageIdBytes
              ? absl::StrCat("layers 0 to ", l, " together: a page of ",
                             page_tokens, " tokens takes ", page_id_bytes,
                             " bytes, but at most ", kMaxPageIdBytes,
                             " are allowed; use smaller pages")
              : absl::StrCat("layers 0 to ", l, " together: a sequence needs ",
                             group.side_pages_per_sequence, " side pages of ",
                             group.page_bytes,
                             " bytes, but their total must be at most ",
                             kMaxPageIdBytes, " bytes"));
    }
  }
  return layout;
}

absl::StatusOr<PageLayout> PageLayout::Create(const kvasir::v1::KvPlan& plan,
                                              const plan::AttentionShape& shape,
                                              const PageFormat& format,
                                              plan::TpShard shard) {
  KVASIR_ASSIGN_OR_RETURN(const plan::ResolvedPlan resolved,
                          plan::ResolvePlan(plan, shape, shard));
  return Create(resolved, format);
}

const LayerLayout& PageLayout::layer(int64_t index) const {
  KVASIR_CHECK(index >= 0 && index < static_cast<int64_t>(layers_.size()));
  return layers_[static_cast<size_t>(index)];
}

const PageGroupLayout& PageLayout::page_group(PageGroupId id) const {
  KVASIR_CHECK(id.valid() && id.value() < static_cast<int32_t>(groups_.size()));
  return groups_[static_cast<size_t>(id.value())];
}

double PageLayout::marginal_bytes_per_token() const {
  int64_t bytes = 0;
  for (const PageGroupLayout& group : groups_) bytes += group.page_bytes;
  return static_cast<double>(bytes) / static_cast<double>(page_tokens());
}

double PageLayout::marginal_payload_bytes_per_token() const {
  int64_t bytes = 0;
  for (const PageGroupLayout& group : groups_) bytes += group.payload_bytes;
  return static_cast<double>(bytes) / static_cast<double>(page_tokens());
}

double PageLayout::PayloadBytesPerToken(int64_t layer_index,
                                        plan::Side side) const {
  int64_t bytes = 0;
  for (const PartLayout& part : layer(layer_index).side(side).parts) {
    if (part.of_keys) continue;
    for (const GroupLayout& group : part.groups) {
      bytes += group.codes.slot_bytes + group.params.slot_bytes;
    }
  }
  return static_cast<double>(bytes);
}

int64_t PageLayout::fixed_bytes_per_sequence() const {
  int64_t bytes = 0;
  for (const PageGroupLayout& group : groups_) {
    bytes += group.side_pages_per_sequence * group.page_bytes;
  }
  return bytes;
}

int64_t PageLayout::fixed_payload_bytes_per_sequence() const {
  int64_t bytes = 0;
  for (const PageGroupLayout& group : groups_) {
    bytes += group.side_payload_bytes;
  }
  return bytes;
}

int64_t PageLayout::PagesHeld(PageGroupId id, int64_t length_tokens,
                              int64_t chunk_tokens) const {
  return page_group(id)
      .sequence_pages(page_tokens())
      .Held(length_tokens, chunk_tokens);
}

int64_t PageLayout::BytesAtLength(int64_t length_tokens,
                                  int64_t chunk_tokens) const {
  int64_t bytes = 0;
  for (const PageGroupLayout& group : groups_) {
    bytes +=
        PagesHeld(group.id, length_tokens, chunk_tokens) * group.page_bytes;
  }
  return bytes;
}

double PageLayout::compression_ratio() const {
  return static_cast<double>(dense_bf16_bytes_) / marginal_bytes_per_token();
}

namespace {

// floor(a * b / c) without overflow.
int64_t MulDiv(int64_t a, int64_t b, int64_t c) {
  return static_cast<int64_t>(static_cast<__int128>(a) * b / c);
}

}  // namespace

PageCounts PageLayout::PagesForBudget(const BudgetRequest& request) const {
  KVASIR_CHECK(request.budget_bytes >= 0);
  const int64_t longest = std::min(request.max_model_len, kMaxSequenceTokens);
  PageCounts need;
  int64_t need_bytes = 0;
  for (const PageGroupLayout& group : groups_) {
    need.push_back(std::max<int64_t>(
        1, PagesHeld(group.id, longest, request.max_chunk_tokens)));
    need_bytes += need.back() * group.page_bytes;
  }
  PageCounts pages(groups_.size(), 0);
  int64_t left = request.budget_bytes;
  const auto give = [&](size_t g, int64_t count) {
    count = std::min(
        {count, left / groups_[g].page_bytes, kMaxPagesPerGroup - pages[g]});
    pages[g] += count;
    left -= count * groups_[g].page_bytes;
  };
  if (need_bytes > left) {
    const int64_t budget = left;
    for (size_t g = 0; g < pages.size(); ++g) {
      give(g, MulDiv(need[g], budget, need_bytes));
    }
    return pages;
  }
  for (size_t g = 0; g < pages.size(); ++g) give(g, need[g]);
  const int64_t rest = left;
  for (size_t g = 0; g < pages.size(); ++g) {
    give(g, MulDiv(need[g], rest, need_bytes));
  }
  // Rounding down has left a part of the budget. It goes to the first groups
  // that can use it.
  for (size_t g = 0; g < pages.size(); ++g) give(g, kMaxPagesPerGroup);
  return pages;
}

absl::Status PageLayout::OneSequenceFits(const PageCounts& pages,
                                         int64_t max_model_len,
                                         int64_t max_chunk_tokens) const {
  KVASIR_CHECK(pages.size() == groups_.size());
  if (max_model_len < 1 || max_model_len > kMaxSequenceTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_model_len must be 1 to ", kMaxSequenceTokens,
                     " tokens, but is ", max_model_len));
  }
  const auto fits = [&](int64_t length) {
    for (const PageGroupLayout& group : groups_) {
      if (PagesHeld(group.id, length, max_chunk_tokens) >
          pages[static_cast<size_t>(group.id.value())]) {
        return false;
      }
    }
    return true;
  };
  if (fits(max_model_len)) return absl::OkStatus();
  int64_t fitting = 0;
  int64_t too_long = max_model_len;
  while (too_long - fitting > 1) {
    const int64_t middle = fitting + (too_long - fitting) / 2;
    (fits(middle) ? fitting : too_long) = middle;
  }
  std::string text = absl::StrCat("the KV cache cannot hold one sequence of ",
                                  max_model_len, " tokens:");
  for (const PageGroupLayout& group : groups_) {
    const int64_t want = PagesHeld(group.id, max_model_len, max_chunk_tokens);
    absl::StrAppend(&text, " page group ", group.id.value(), " needs ", want,
                    " pages of ", group.page_bytes, " bytes and has ",
                    pages[static_cast<size_t>(group.id.value())], ";");
  }
  absl::StrAppend(&text, " raise --kv-cache-bytes to at least ",
                  Mebibytes(BytesAtLength(max_model_len, max_chunk_tokens)));
  if (fitting > 0) {
    absl::StrAppend(&text, " or lower --max-model-len to at most ", fitting);
  }
  return absl::FailedPreconditionError(text);
}

}  // namespace kvasir::cache
