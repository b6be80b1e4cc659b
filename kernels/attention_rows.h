// The rows of a unit of attention: which token and head each is, and where its
// numbers are. C++17.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention_plan.h"

namespace kvasir::kernels {

struct RowRange {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// Rows are numbered head by head, or, where all heads share everything, query
// by query, so that rows that see the same slots are neighbours.
class UnitRows {
 public:
  UnitRows(const AttentionPlan& plan, const AttentionUnit& unit)
      : params_(plan.params()),
        plan_(plan),
        unit_(unit),
        query_major_(unit.slice->one_span_each) {}

  int64_t count() const { return unit_.rows(); }
  const AttentionSequence& sequence() const { return *unit_.sequence; }

  RowRange RowsOf(const HeadSpan& span) const {
    if (query_major_) return {0, count()};
    return {span.begin * unit_.num_queries, span.end * unit_.num_queries};
  }
  const float* QueryRow(int64_t part, int64_t r) const {
    return params_.q + TokenRow(r) * params_.q_row_stride +
           params_.keys[part].query_column[HeadOf(r)];
  }
  float* OutOf(int64_t part, int64_t r) const {
    return params_.out + TokenRow(r) * params_.out_row_stride +
           params_.values[part].out_column[HeadOf(r)];
  }

  AttentionPlan::Spans KeySpans(int64_t part) const {
    return plan_.spans(*unit_.slice, part);
  }
  // Calls function(part, span) for every value part.
  template <typename Function>
  void ForValueSpans(const Function& function) const {
    for (int64_t p = 0; p < params_.num_value_parts; ++p) {
      const AttentionPlan::Spans spans =
          plan_.spans(*unit_.slice, params_.num_key_parts + p);
      for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
        function(p, *span);
      }
    }
  }
  // Calls function(part, group, row) for every value part.
  template <typename Function>
  void ForValueRows(const Function& function) const {
    ForValueSpans([&](int64_t p, const HeadSpan& span) {
      const LatentGroup& group = params_.values[p].latents.groups[span.group];
      const RowRange rows = RowsOf(span);
      for (int64_t r = rows.begin; r < rows.end; ++r) function(p, group, r);
    });
  }

  // Calls function(rows, visible) for runs of rows that see the same part of
  // the block; `visible` is relative to the block.
  template <typename Function>
  void ForVisible(RowRange rows, int64_t block,
                  const Function& function) const {
    if (AllSeeWhole(block)) {
      return function(rows, VisibleRange{0, kAttentionBlockSlots});
    }
    for (int64_t r = rows.begin; r < rows.end;) {
      const VisibleRange visible = InBlock(r, block);
      int64_t end = r + 1;
      while (end < rows.end) {
        const VisibleRange other = InBlock(end, block);
        if (other.begin != visible.begin || other.end != visible.end) break;
        ++end;
      }
      if (visible.begin < visible.end) function(RowRange{r, end}, visible);
      r = end;
    }
  }

 private:
  int64_t QueryOf(int64_t r) const {
    return unit_.query_begin +
           (query_major_ ? r / unit_.slice->num_heads : r % unit_.num_queries);
  }
  int64_t HeadOf(int64_t r) const {
    const int64_t index =
        query_major_ ? r % unit_.slice->num_heads : r / unit_.num_queries;
    return plan_.heads()[unit_.slice->first_head + index];
  }
  int64_t TokenRow(int64_t r) const {
    return unit_.sequence->first_row + QueryOf(r);
  }
  // The first token sees least ahead, the last one least behind.
  bool AllSeeWhole(int64_t block) const {
    const VisibleRange first =
        VisibleSlots(params_, *unit_.sequence, unit_.query_begin);
    const VisibleRange last = VisibleSlots(
        params_, *unit_.sequence, unit_.query_begin + unit_.num_queries - 1);
    return last.begin <= block && first.end >= block + kAttentionBlockSlots;
  }
  VisibleRange InBlock(int64_t r, int64_t block) const {
    const VisibleRange slots =
        VisibleSlots(params_, *unit_.sequence, QueryOf(r));
    return {std::max<int64_t>(slots.begin - block, 0),
            std::min(slots.end - block, kAttentionBlockSlots)};
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  const AttentionUnit unit_;
  const bool query_major_;
};

}  // namespace kvasir::kernels
