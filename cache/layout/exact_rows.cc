#include "cache/layout/exact_rows.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/check.h"

namespace kvasir::cache {
namespace {

// The exact rows of a layer's keys or values begin at a multiple of this
// number, a cache line.
constexpr int64_t kRowAlignmentBytes = 64;
// The exact rows of a layer's keys or values are split over the arenas of at
// most this many layers. An arena is the memory of all pages of a layer.
constexpr int64_t kMostArenas = 4;
static_assert(2 * kMostArenas == kMostExactSegments);
// Arena::Room counts at most this many rows in new pages, so that sums of its
// results do not overflow. No page group has nearly as many rows.
constexpr int64_t kManyRows = int64_t{1} << 48;
// Limits the search for a distribution with fewer side pages. One try costs
// (number of sides with exact rows) * (number of arenas), but at least
// kLeastEffortOfTry. 30 layers with two such sides each get about 145 tries.
constexpr int64_t kMostEffort = int64_t{1} << 18;
constexpr int64_t kLeastEffortOfTry = 64;

// The side pages (pages besides token pages) that one sequence has in the arena
// of one layer. They are filled from the front with rows of any size.
class Arena {
 public:
  // The first `taken` side pages hold other data.
  Arena(int64_t layer, int64_t page_bytes, int64_t taken)
      : layer_(layer), page_bytes_(page_bytes), page_(taken) {}

  int64_t layer() const { return layer_; }
  // The number of pages that hold data.
  int64_t pages() const { return page_ + (used_bytes_ > 0 ? 1 : 0); }

  // The number of rows that still fit if `side_pages` pages may be used.
  int64_t Room(int64_t side_pages, int64_t row_bytes) const {
    const int64_t per_page = page_bytes_ / row_bytes;
    const int64_t whole_pages = side_pages - pages();
    if (per_page == 0 || whole_pages < 0) return 0;
    return RowsInPage(row_bytes) + (whole_pages > kManyRows / per_page
                                        ? kManyRows
                                        : whole_pages * per_page);
  }

  // The number of pages that would hold data if the rows of `ring` were placed
  // in further pages of their own. Empty if a page is too small for a row.
  std::optional<int64_t> PagesWith(const ExactRing& ring) const {
    const int64_t per_page = page_bytes_ / ring.row_bytes;
    if (per_page == 0) return std::nullopt;
    return pages() + CeilDiv(ring.tokens(), per_page);
  }

  // Makes the next rows begin a new page.
  void BeginPage() {
    page_ = pages();
    used_bytes_ = 0;
  }

  // Places the next `count` rows of `ring` in this arena, and appends their
  // segments to `ring`.
  void Take(int64_t count, ExactRing* ring) {
    int64_t first_row = 0;
    if (!ring->segments.empty()) {
      const ExactSegment& last = ring->segments.back();
      first_row = last.first_row + last.num_rows;
    }
    const auto add = [&](int64_t rows, int64_t per_page) {
      ring->segments.push_back(
          {layer_, first_row, rows, page_, used_bytes_, per_page});
      first_row += rows;
      count -= rows;
    };
    if (used_bytes_ > 0) {
      const int64_t rows = std::min(count, RowsInPage(ring->row_bytes));
      if (rows > 0) {
        add(rows, rows);
        Use(rows * ring->row_bytes);
      }
      if (count == 0) return;
      BeginPage();
    }
    const int64_t per_page = page_bytes_ / ring->row_bytes;
    const int64_t rows = count;
    add(rows, per_page);
    page_ += rows / per_page;
    Use(rows % per_page * ring->row_bytes);
  }

 private:
  // The number of rows that still fit into the partly filled page.
  int64_t RowsInPage(int64_t row_bytes) const {
    return used_bytes_ > 0 ? (page_bytes_ - used_bytes_) / row_bytes : 0;
  }
  void Use(int64_t bytes) {
    used_bytes_ =
        std::min(page_bytes_, CeilDiv(used_bytes_ + bytes, kRowAlignmentBytes) *
                                  kRowAlignmentBytes);
  }

  int64_t layer_;
  int64_t page_bytes_;
  int64_t page_;            // index of the first side page with room
  int64_t used_bytes_ = 0;  // used bytes of page page_
};

// The exact rows of a layer's keys or values, which are not placed yet.
struct UnplacedRows {
  size_t home;  // index of the arena of the rows' own layer
  ExactRing* ring;
};

// A distribution of all exact rows of a page group over the arenas of
// its layers.
struct Filling {
  std::vector<Arena> arenas;
  std::vector<ExactRing> rings;  // in the order of RowPlacer::rows_

  int64_t side_pages() const {
    int64_t most = 0;
    for (const Arena& arena : arenas) most = std::max(most, arena.pages());
    return most;
  }
};

// Finds a distribution of a page group's exact rows over its arenas.
class RowPlacer {
 public:
  RowPlacer(std::vector<Arena> arenas, std::vector<UnplacedRows> rows)
      : arenas_(std::move(arenas)), rows_(std::move(rows)) {}

  // Returns a distribution with few side pages per arena, but at least `least`.
  // The pages of at least one arena must be large enough for the widest row.
  Filling Place(int64_t least) const {
    Filling best = Bisect(least);
    Filling whole = FillWithWholeSides();
    if (whole.side_pages() < best.side_pages()) best = std::move(whole);
    // Fill is greedy: it may fail with some number of pages and succeed with
    // fewer. So smaller numbers than the best one are tried as well.
    const int64_t effort = std::max(
        kLeastEffortOfTry, static_cast<int64_t>(rows_.size() * arenas_.size()));
    for (int64_t tried =
             std::max(least, best.side_pages() - kMostEffort / effort);
         tried < best.side_pages(); ++tried) {
      std::optional<Filling> filling = Fill(tried);
      if (filling.has_value()) return *std::move(filling);
    }
    return best;
  }

 private:
  // Searches for the fewest side pages by bisection. This assumes that if Fill
  // succeeds with some number of pages, it also succeeds with all larger
  // numbers.
  Filling Bisect(int64_t least) const {
    int64_t most = least;
    std::optional<Filling> best = Fill(most);
    for (int64_t step = 1; !best.has_value(); step *= 2) {
      least = most + 1;
      most += step;
      best = Fill(most);
    }
    while (least < most) {
      const int64_t middle = least + (most - least) / 2;
      std::optional<Filling> filling = Fill(middle);
      if (filling.has_value()) {
        best = std::move(filling);
        most = middle;
      } else {
        least = middle + 1;
      }
    }
    return *std::move(best);
  }

  // Never splits a set (the rows of one layer's keys or values). Places the
  // largest set first. Each set gets pages of its own in one arena: the one
  // that then has the fewest used pages.
  Filling FillWithWholeSides() const {
    Filling filling = Empty();
    std::vector<ExactRing*> sides;
    for (ExactRing& ring : filling.rings) sides.push_back(&ring);
    std::stable_sort(
        sides.begin(), sides.end(), [](const ExactRing* a, const ExactRing* b) {
          return a->tokens() * a->row_bytes > b->tokens() * b->row_bytes;
        });
    for (ExactRing* const ring : sides) {
      Arena* first = nullptr;
      int64_t end = 0;
      for (Arena& arena : filling.arenas) {
        const std::optional<int64_t> pages = arena.PagesWith(*ring);
        if (!pages.has_value() || (first != nullptr && *pages >= end)) continue;
        first = &arena;
        end = *pages;
      }
      KVASIR_CHECK(first != nullptr);
      first->BeginPage();
      first->Take(ring->tokens(), ring);
    }
    return filling;
  }

  // Places all rows in at most `side_pages` pages of each arena. First keeps
  // each set in one arena. If the rows do not fit, allows it to be split over
  // two, then three, up to kMostArenas. Returns nothing if they never fit.
  std::optional<Filling> Fill(int64_t side_pages) const {
    for (int64_t most = 1; most <= kMostArenas; ++most) {
      std::optional<Filling> filling = FillWith(side_pages, most);
      if (filling.has_value()) return filling;
    }
    return std::nullopt;
  }

  Filling Empty() const {
    Filling filling{arenas_, {}};
    for (const UnplacedRows& rows : rows_) filling.rings.push_back(*rows.ring);
    return filling;
  }

  // Places the widest rows first, because they fit into the pages of the fewest
  // arenas. Among rows of equal width, each set that fits completely into its
  // own layer's arena goes there; the other sets then fill the gaps.
  std::optional<Filling> FillWith(int64_t side_pages,
                                  int64_t most_arenas) const {
    Filling filling = Empty();
    for (size_t begin = 0; begin < rows_.size();) {
      size_t end = begin;
      const int64_t row_bytes = filling.rings[begin].row_bytes;
      while (end < rows_.size() && filling.rings[end].row_bytes == row_bytes) {
        ++end;
      }
      for (size_t i = begin; i < end; ++i) {
        ExactRing& ring = filling.rings[i];
        Arena& home = filling.arenas[rows_[i].home];
        if (home.Room(side_pages, row_bytes) < ring.tokens()) continue;
        home.Take(ring.tokens(), &ring);
      }
      for (size_t i = begin; i < end; ++i) {
        ExactRing& ring = filling.rings[i];
        if (!ring.segments.empty()) continue;
        if (!Split(side_pages, most_arenas, &ring, &filling.arenas)) {
          return std::nullopt;
        }
      }
      begin = end;
    }
    return filling;
  }

  // Splits the rows of `ring` over at most `most_arenas` arenas. Each turn
  // chooses one arena. It is the one with the least room among those after
  // which the remaining turns can still place all other rows. Returns false if
  // the rows do not fit.
  static bool Split(int64_t side_pages, int64_t most_arenas, ExactRing* ring,
                    std::vector<Arena>* arenas) {
    int64_t left = ring->tokens();
    for (int64_t others = most_arenas - 1; left > 0; --others) {
      if (others < 0) return false;
      // free rows of each arena, and the arena's index
      std::vector<std::pair<int64_t, size_t>> rooms;
      for (size_t a = 0; a < arenas->size(); ++a) {
        const int64_t room = (*arenas)[a].Room(side_pages, ring->row_bytes);
        if (room > 0) rooms.emplace_back(room, a);
      }
      std::sort(rooms.begin(), rooms.end());
      // `in_others` is the number of rows that fit into the `others` arenas
      // with the most room. If this turn chooses one of these arenas, the arena
      // just before them in `rooms` takes its place in the sum.
      const size_t first_other =
          rooms.size() - std::min(rooms.size(), static_cast<size_t>(others));
      int64_t in_others = 0;
      for (size_t i = first_other; i < rooms.size(); ++i) {
        in_others += std::min(rooms[i].first, left);
      }
      const int64_t next_room =
          first_other > 0 ? rooms[first_other - 1].first : 0;
      const auto chosen =
          std::find_if(rooms.begin(), rooms.end(), [&](const auto& room) {
            const bool other =
                static_cast<size_t>(&room - rooms.data()) >= first_other;
            return in_others + (other ? next_room : room.first) >= left;
          });
      if (chosen == rooms.end()) return false;
      const int64_t rows = std::min(left, chosen->first);
      (*arenas)[chosen->second].Take(rows, ring);
      left -= rows;
    }
    return true;
  }

  const std::vector<Arena> arenas_;
  const std::vector<UnplacedRows> rows_;
};

void FillUpForRows(const std::vector<int64_t>& group,
                   std::vector<LayerLayout>& layers) {
  int64_t page_bytes = 0;  // the size of the largest page
  int64_t row_bytes = 0;
  LayerLayout* widest = nullptr;
  for (const int64_t l : group) {
    LayerLayout& layer = layers[static_cast<size_t>(l)];
    page_bytes = std::max(page_bytes, layer.page_bytes);
    for (const SideLayout* side : {&layer.key, &layer.value}) {
      if (!side->exact.any() || side->exact.row_bytes <= row_bytes) continue;
      row_bytes = side->exact.row_bytes;
      widest = &layer;
    }
  }
  if (row_bytes > page_bytes) {
    widest->page_bytes =
        CeilDiv(row_bytes, kRegionAlignmentBytes) * kRegionAlignmentBytes;
  }
}

}  // namespace

void LayOutExactRow(SideLayout& side) {
  for (PartLayout& part : side.parts) {
    for (GroupLayout& group : part.groups) {
      group.exact_offset_bytes = side.exact.row_bytes;
      side.exact.row_bytes += group.stored_width * kExactNumberBytes;
    }
  }
}

void PlaceExactRows(const std::vector<int64_t>& group,
                    std::vector<LayerLayout>& layers) {
  FillUpForRows(group, layers);
  std::vector<Arena> arenas;
  std::vector<UnplacedRows> rows;
  int64_t page_id_bytes = 0;
  int64_t row_bytes = 0;
  int64_t least = 0;
  for (const bool keys : {true, false}) {
    for (size_t a = 0; a < group.size(); ++a) {
      LayerLayout& layer = layers[static_cast<size_t>(group[a])];
      ExactRing& ring = keys ? layer.key.exact : layer.value.exact;
      if (keys) {
        arenas.emplace_back(group[a], layer.page_bytes, layer.side_pages);
        page_id_bytes += layer.page_bytes;
        least = std::max(least, layer.side_pages);
      }
      if (!ring.any()) continue;
      rows.push_back({a, &ring});
      row_bytes += ring.tokens() * ring.row_bytes;
    }
  }
  if (rows.empty()) return;
  std::stable_sort(rows.begin(), rows.end(),
                   [](const UnplacedRows& a, const UnplacedRows& b) {
                     return a.ring->row_bytes > b.ring->row_bytes;
                   });
  // Place succeeds, because the pages of at least one arena are large enough
  // for the widest row.
  const Filling placed =
      RowPlacer(std::move(arenas), rows)
          .Place(std::max(least, CeilDiv(row_bytes, page_id_bytes)));
  for (size_t i = 0; i < rows.size(); ++i) *rows[i].ring = placed.rings[i];
  for (const Arena& arena : placed.arenas) {
    layers[static_cast<size_t>(arena.layer())].side_pages = arena.pages();
  }
}

}  // namespace kvasir::cache
