// Manages the pages of one page group: the number of references to each page,
// the free pages, and the cached pages, which a prompt may still find.
//
// A page is in one of three states:
//   used    references >= 1
//   cached  no references, but tagged. Cached pages are in a list, the oldest
//           first. Share makes one used again, ClearTag makes it free.
//   free    no references and no tag
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "base/strong_id.h"

namespace kvasir::cache {

// A page of one group's pool, 0 .. N-1.
using PageId = base::StrongId<struct PageTag, int32_t>;

class PagePool;

// One reference to a page. The destructor gives it back. It is movable but not
// copyable; PagePool::Share makes a second reference. The pool must outlive
// its pins.
class PagePin {
 public:
  PagePin() = default;
  PagePin(PagePin&& other) noexcept
      : pool_(std::exchange(other.pool_, nullptr)), page_(other.page_) {}
  PagePin& operator=(PagePin&& other) noexcept {
    PagePin moved(std::move(other));
    std::swap(pool_, moved.pool_);
    std::swap(page_, moved.page_);
    return *this;
  }
  ~PagePin() { Reset(); }

  explicit operator bool() const { return pool_ != nullptr; }
  // The referenced page. Invalid if the pin is empty.
  PageId page() const { return pool_ != nullptr ? page_ : PageId(); }
  void Reset();

 private:
  friend class PagePool;
  PagePin(PagePool* pool, PageId page) : pool_(pool), page_(page) {}

  PagePool* pool_ = nullptr;
  PageId page_;
};

// Owns: the state of N pages, not their bytes.
// Threads: used only by the scheduler thread.
// Errors: if no page is free, Allocate returns an empty optional. Misuse is
// a CHECK.
// Cost: every method except CountersAgree is O(1).
class PagePool {
 public:
  explicit PagePool(int64_t num_pages);
  ~PagePool();  // CHECKs that no pin is left
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  // Takes a free page and returns its only reference. At first, ids come in
  // rising order; later, the page that was freed last is taken first. Empty if
  // no page is free. Cached pages are not taken; to free one, clear the tag of
  // oldest_cached().
  std::optional<PagePin> Allocate();

  // Returns one more reference to a used or cached page.
  PagePin Share(PageId page);

  // Tags a page, so that it becomes cached instead of free when its last
  // reference goes. The prefix index uses the tag to find the page's node. The
  // tag must be at least 0, and the page must be used and untagged.
  void SetTag(PageId page, int32_t tag);
  // Removes the tag, which must exist. A cached page becomes free.
  void ClearTag(PageId page);
  // The page's tag. -1: it has none.
  int32_t tag(PageId page) const { return state(page).tag; }

  // The cached page that lost its last reference the longest time ago. Invalid
  // if there is no cached page.
  PageId oldest_cached() const { return PageId(cached_head_); }
  PageId next_cached(PageId page) const { return PageId(state(page).next); }

  int32_t references(PageId page) const { return state(page).references; }

  // Sets how many slots of the page hold a token. total_filled_slots() counts
  // them while the page is used.
  void SetFilledSlots(PageId page, int32_t slots);
  int32_t filled_slots(PageId page) const { return state(page).filled_slots; }

  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }
  int64_t free_pages() const { return num_free_; }
  int64_t cached_pages() const { return num_cached_; }
  int64_t used_pages() const { return num_pages() - num_free_ - num_cached_; }
  // The number of pages that can be allocated, including cached pages after
  // their tags are cleared.
  int64_t available_pages() const { return num_free_ + num_cached_; }
  int64_t total_references() const { return total_references_; }
  // The sum of the filled slots of all used pages.
  int64_t total_filled_slots() const { return total_filled_slots_; }
  int64_t metadata_bytes() const {
    return static_cast<int64_t>(pages_.capacity() * sizeof(PageState));
  }

  // False if the lists and the counters contradict each other. O(N).
  bool CountersAgree() const;

 private:
  friend class PagePin;

  struct PageState {
    int32_t references = 0;
    int32_t tag = -1;
    int32_t previous = -1;  // in the list of cached pages
    int32_t next = -1;      // in the list of cached or of free pages
    int32_t filled_slots = 0;
  };

  PageState& state(PageId page);
  const PageState& state(PageId page) const;
  // Gives back one reference. Only this function makes a used page cached or
  // free.
  void Unreference(PageId page);
  void PushFree(PageId page);
  void AppendCached(PageId page);
  void RemoveCached(PageId page);

  std::vector<PageState> pages_;
  int32_t free_head_ = -1;
  int32_t cached_head_ = -1;
  int32_t cached_tail_ = -1;
  int64_t num_free_ = 0;
  int64_t num_cached_ = 0;
  int64_t total_references_ = 0;
  int64_t total_filled_slots_ = 0;
};

}  // namespace kvasir::cache
