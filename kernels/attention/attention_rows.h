// The rows of a unit of attention, or of a panel of it: which token and head
// each is, and where its numbers are. C++17.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/attention/grid/attention_grid.h"

namespace kvasir::kernels {

struct RowRange {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// How slots that a row sees are read, where values have an exact window.
enum class ReadAs { kAny, kStored, kExact };

// Rows are numbered head by head, or, where all heads share everything, query
// by query, so that rows that see the same slots are neighbours.
class UnitRows {
 public:
  UnitRows(const AttentionGrid& grid, const AttentionUnit& unit)
      : params_(grid.params()),
        grid_(grid),
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

  AttentionGrid::Spans KeySpans(int64_t part) const {
    return grid_.spans(*unit_.slice, part);
  }
  AttentionGrid::Spans ValueSpans(int64_t part) const {
    return grid_.spans(*unit_.slice, params_.num_key_parts + part);
  }
  // Calls function(part, span) for every value part of the cache.
  template <typename Function>
  void ForValueSpans(const Function& function) const {
    ForSpans({0, grid_.num_stored_values()}, function);
  }
  // The same for the parts of exact rows.
  template <typename Function>
  void ForExactValueSpans(const Function& function) const {
    ForSpans({grid_.num_stored_values(), params_.num_value_parts}, function);
  }
  // Calls function(part, width, row) for every value part of the cache: where a
  // row's sum is, and how many numbers it has.
  template <typename Function>
  void ForValueRows(const Function& function) const {
    ForValueSpans([&](int64_t p, const HeadSpan& span) {
      const int64_t width = OutWidth(params_.values[p], span.group);
      const RowRange rows = RowsOf(span);
      for (int64_t r = rows.begin; r < rows.end; ++r) function(p, width, r);
    });
  }
  const LatentGroup& ValueGroup(int64_t part, int64_t r) const {
    const AttentionValuePartArgs& value = params_.values[part];
    return value.latents
        .groups[value.group_of_head[HeadOf(r) / grid_.heads_per_kv()]];
  }

  // Of slots that some row sees, those that some row reads through the codec,
  // and those that some row reads as exact rows.
  VisibleRange Stored(const ExactWindow& window, VisibleRange slots) const {
    if (window.tokens > 0) {
      slots.end = std::min(
          slots.end,
          FirstExact(window, unit_.query_begin + unit_.num_queries - 1));
    }
    return slots;
  }
  VisibleRange Exact(const ExactWindow& window, VisibleRange slots) const {
    slots.begin =
        window.tokens > 0
            ? std::max(slots.begin, FirstExact(window, unit_.query_begin))
            : slots.end;
    return slots;
  }
  // First slot that a row reads as an exact row.
  int64_t FirstExactOf(const ExactWindow& window, int64_t r) const {
    return FirstExact(window, QueryOf(r));
  }

  // Calls function(rows, visible) for runs of rows that see the same part of
  // the block; `visible` is relative to the block.
  template <typename Function>
  void ForVisible(RowRange rows, int64_t block,
                  const Function& function) const {
    ForSlots(ReadAs::kAny, rows, block, function);
  }
  // The same for the slots whose values are those of part `part`.
  template <typename Function>
  void ForValueSlots(int64_t part, RowRange rows, int64_t block,
                     const Function& function) const {
    ForSlots(params_.value_exact.tokens == 0    ? ReadAs::kAny
             : part < grid_.num_stored_values() ? ReadAs::kStored
                                                : ReadAs::kExact,
             rows, block, function);
  }

 private:
  template <typename Function>
  void ForSpans(RowRange parts, const Function& function) const {
    for (int64_t p = parts.begin; p < parts.end; ++p) {
      const AttentionGrid::Spans spans = ValueSpans(p);
      for (const HeadSpan* span = spans.begin; span != spans.end; ++span) {
        function(p, *span);
      }
    }
  }
  template <typename Function>
  void ForSlots(ReadAs read, RowRange rows, int64_t block,
                const Function& function) const {
    if (AllSeeWhole(read, block)) {
      return function(rows, VisibleRange{0, kAttentionBlockSlots});
    }
    for (int64_t r = rows.begin; r < rows.end;) {
      const VisibleRange visible = InBlock(read, r, block);
      int64_t end = r + 1;
      while (end < rows.end) {
        const VisibleRange other = InBlock(read, end, block);
        if (other.begin != visible.begin || other.end != visible.end) break;
        ++end;
      }
      if (visible.begin < visible.end) function(RowRange{r, end}, visible);
      r = end;
    }
  }

  int64_t QueryOf(int64_t r) const {
    return unit_.query_begin +
           (query_major_ ? r / unit_.slice->num_heads : r % unit_.num_queries);
  }
  int64_t HeadOf(int64_t r) const {
    const int64_t index =
        query_major_ ? r % unit_.slice->num_heads : r / unit_.num_queries;
    return grid_.heads()[unit_.slice->first_head + index];
  }
  int64_t TokenRow(int64_t r) const {
    return unit_.sequence->first_row + QueryOf(r);
  }
  int64_t FirstExact(const ExactWindow& window, int64_t query) const {
    return unit_.sequence->first_slot + query + 1 - window.tokens;
  }
  VisibleRange SlotsOf(ReadAs read, int64_t query) const {
    VisibleRange slots = VisibleSlots(params_, *unit_.sequence, query);
    if (read == ReadAs::kAny) return slots;
    const int64_t exact = FirstExact(params_.value_exact, query);
    if (read == ReadAs::kStored) {
      slots.end = std::min(slots.end, exact);
    } else {
      slots.begin = std::max(slots.begin, exact);
    }
    return slots;
  }
  // The first token sees least ahead, the last one least behind.
  bool AllSeeWhole(ReadAs read, int64_t block) const {
    const VisibleRange first = SlotsOf(read, unit_.query_begin);
    const VisibleRange last =
        SlotsOf(read, unit_.query_begin + unit_.num_queries - 1);
    return last.begin <= block && first.end >= block + kAttentionBlockSlots;
  }
  VisibleRange InBlock(ReadAs read, int64_t r, int64_t block) const {
    const VisibleRange slots = SlotsOf(read, QueryOf(r));
    return {std::max<int64_t>(slots.begin - block, 0),
            std::min(slots.end - block, kAttentionBlockSlots)};
  }

  const PagedAttentionArgs& params_;
  const AttentionGrid& grid_;
  const AttentionUnit unit_;
  const bool query_major_;
};

}  // namespace kvasir::kernels
