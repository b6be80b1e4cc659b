// The rows of a unit of attention work or of one of its panels. A row is one
// query head of one token. Finds the token and head of a row, where its data is
// in q and out, and the slots that it reads. C++17.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/attention/grid/attention_grid.h"

namespace kvasir::kernels {

struct RowRange {
  int64_t begin;
  int64_t end;
  int64_t size() const { return end - begin; }
};

// How a row reads a slot. kSinks: as an exact row of the sinks. kStored: as a
// latent. kWindow: as an exact row of the window. kAny: in any of these forms.
// A slot's key and value may be read in different forms.
enum class ReadAs { kAny, kSinks, kStored, kWindow };

// If all heads of the unit share one span in every part, rows are numbered
// query by query, so that rows that see the same slots are neighbours.
// Otherwise they are numbered head by head.
class UnitRows {
 public:
  UnitRows(const AttentionGrid& grid, const AttentionUnit& unit)
      : params_(grid.params()),
        grid_(grid),
        unit_(unit),
        query_major_(unit.slice->one_span_each) {}

  int64_t count() const { return unit_.rows(); }
  const AttentionSequence& sequence() const { return *unit_.sequence; }

  int64_t QueryOf(int64_t r) const {
    return unit_.query_begin +
           (query_major_ ? r / unit_.slice->num_heads : r % unit_.num_queries);
  }
  int64_t HeadOf(int64_t r) const {
    const int64_t index =
        query_major_ ? r % unit_.slice->num_heads : r / unit_.num_queries;
    return grid_.heads()[unit_.slice->first_head + index];
  }
  // Returns the query heads of the unit. Each query of the unit has one row
  // per head.
  const int64_t* heads() const {
    return grid_.heads() + unit_.slice->first_head;
  }
  // Returns the row of q and out for the token of the unit's row r.
  int64_t TokenRow(int64_t r) const {
    return unit_.sequence->first_row + QueryOf(r);
  }

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
  // Calls function(part, span) for every span of every value part of the cache.
  template <typename Function>
  void ForValueSpans(const Function& function) const {
    ForSpans({0, grid_.num_stored_values()}, function);
  }
  // Calls function(part, span) for every span of every value part of exact
  // rows.
  template <typename Function>
  void ForExactValueSpans(const Function& function) const {
    ForSpans({grid_.num_stored_values(), params_.num_value_parts}, function);
  }
  // Calls function(part, width, row) for every row of every value part of the
  // cache. `width` is the length of the row's weighted sum of values.
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

  // Returns the part of `slots` that at least one row of the unit reads as
  // `read`. At least one row must see each of `slots`.
  VisibleRange ReadIn(ReadAs read, const ExactSlots& exact,
                      VisibleRange slots) const {
    const int64_t query = read == ReadAs::kStored
                              ? unit_.query_begin + unit_.num_queries - 1
                              : unit_.query_begin;
    return Limit(read, exact, query, slots);
  }
  // Returns the part of `slots` from the first to the last slot that any row
  // reads as an exact row. The result may include slots between sinks and
  // window, which no row reads as exact rows.
  VisibleRange ExactIn(const ExactSlots& exact, VisibleRange slots) const {
    const VisibleRange sinks = ReadIn(ReadAs::kSinks, exact, slots);
    const VisibleRange window = ReadIn(ReadAs::kWindow, exact, slots);
    if (sinks.begin >= sinks.end) return window;
    return {sinks.begin, std::max(sinks.end, window.end)};
  }
  // Returns the slots of a block that row r reads as `read`, counted from the
  // start of the block; empty if end <= begin.
  VisibleRange OfBlock(ReadAs read, const ExactSlots& exact, int64_t r,
                       int64_t block) const {
    const VisibleRange slots =
        Limit(read, exact, QueryOf(r), {block, block + kAttentionBlockSlots});
    return {slots.begin - block, slots.end - block};
  }

  // Calls function(rows, visible) for each run of neighbouring rows that see
  // the same slots of the block. `visible` is counted from the start of the
  // block.
  template <typename Function>
  void ForVisible(RowRange rows, int64_t block,
                  const Function& function) const {
    ForSlots(ReadAs::kAny, rows, block, function);
  }
  // Like ForVisible, but only for slots whose values are read as `read`.
  template <typename Function>
  void ForValueSlots(ReadAs read, RowRange rows, int64_t block,
                     const Function& function) const {
    ForSlots(read, rows, block, function);
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

  // Returns the part of `slots` that a query reads as `read`; empty if end
  // <= begin.
  VisibleRange Limit(ReadAs read, const ExactSlots& exact, int64_t query,
                     VisibleRange slots) const {
    // The window of exact rows begins at this slot.
    const int64_t nearer =
        exact.window > 0 ? std::max(exact.sinks, unit_.sequence->first_slot +
                                                     query + 1 - exact.window)
                         : std::numeric_limits<int64_t>::max();
    switch (read) {
      case ReadAs::kAny:
        return slots;
      case ReadAs::kSinks:
        return {slots.begin, std::min(slots.end, exact.sinks)};
      case ReadAs::kStored:
        return {std::max(slots.begin, exact.sinks),
                std::min(slots.end, nearer)};
      case ReadAs::kWindow:
        return {std::max(slots.begin, nearer), slots.end};
    }
    return slots;
  }
  VisibleRange SlotsOf(ReadAs read, int64_t query) const {
    return Limit(read, params_.value_exact, query,
                 VisibleSlots(params_, *unit_.sequence, query));
  }
  // Checking two tokens suffices: the first token's range ends first, and the
  // last token's range begins last.
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
