#include "cache/pages/page_pool.h"

#include <limits>

#include "base/check.h"

namespace kvasir::cache {

void PagePin::Reset() {
  if (pool_ == nullptr) return;
  std::exchange(pool_, nullptr)->Unreference(page_);
}

PagePool::PagePool(int64_t num_pages) {
  KVASIR_CHECK(num_pages >= 0 &&
               num_pages <= std::numeric_limits<int32_t>::max());
  pages_.resize(static_cast<size_t>(num_pages));
  for (int64_t page = num_pages - 1; page >= 0; --page) {
    PushFree(PageId(static_cast<int32_t>(page)));
  }
}

PagePool::~PagePool() { KVASIR_CHECK(total_references_ == 0); }

PagePool::PageState& PagePool::state(PageId page) {
  KVASIR_CHECK(page.valid() && page.value() < num_pages());
  return pages_[static_cast<size_t>(page.value())];
}

const PagePool::PageState& PagePool::state(PageId page) const {
  KVASIR_CHECK(page.valid() && page.value() < num_pages());
  return pages_[static_cast<size_t>(page.value())];
}

std::optional<PagePin> PagePool::Allocate() {
  if (free_head_ < 0) return std::nullopt;
  const PageId page(free_head_);
  PageState& s = state(page);
  free_head_ = s.next;
  s.next = -1;
  s.references = 1;
  s.filled_slots = 0;
  --num_free_;
  ++total_references_;
  return PagePin(this, page);
}

PagePin PagePool::Share(PageId page) {
  PageState& s = state(page);
  if (s.references == 0) {
    KVASIR_CHECK(s.tag >= 0);  // a free page has no content to share
    RemoveCached(page);
    total_filled_slots_ += s.filled_slots;
  }
  ++s.references;
  ++total_references_;
  return PagePin(this, page);
}

void PagePool::SetTag(PageId page, int32_t tag) {
  PageState& s = state(page);
  KVASIR_CHECK(tag >= 0 && s.tag < 0 && s.references > 0);
  s.tag = tag;
}

void PagePool::ClearTag(PageId page) {
  PageState& s = state(page);
  KVASIR_CHECK(s.tag >= 0);
  s.tag = -1;
  if (s.references == 0) {
    RemoveCached(page);
    PushFree(page);
  }
}

void PagePool::SetFilledSlots(PageId page, int32_t slots) {
  PageState& s = state(page);
  KVASIR_CHECK(slots >= 0 && s.references > 0);
  total_filled_slots_ += slots - s.filled_slots;
  s.filled_slots = slots;
}

void PagePool::Unreference(PageId page) {
  PageState& s = state(page);
  KVASIR_CHECK(s.references > 0);
  --s.references;
  --total_references_;
  if (s.references > 0) return;
  total_filled_slots_ -= s.filled_slots;
  if (s.tag >= 0) {
    AppendCached(page);
  } else {
    PushFree(page);
  }
}

void PagePool::PushFree(PageId page) {
  state(page).next = free_head_;
  free_head_ = page.value();
  ++num_free_;
}

void PagePool::AppendCached(PageId page) {
  PageState& s = state(page);
  s.previous = cached_tail_;
  s.next = -1;
  if (cached_tail_ >= 0) {
    state(PageId(cached_tail_)).next = page.value();
  } else {
    cached_head_ = page.value();
  }
  cached_tail_ = page.value();
  ++num_cached_;
}

void PagePool::RemoveCached(PageId page) {
  PageState& s = state(page);
  if (s.previous >= 0) {
    state(PageId(s.previous)).next = s.next;
  } else {
    cached_head_ = s.next;
  }
  if (s.next >= 0) {
    state(PageId(s.next)).previous = s.previous;
  } else {
    cached_tail_ = s.previous;
  }
  s.previous = -1;
  s.next = -1;
  --num_cached_;
}

bool PagePool::CountersAgree() const {
  int64_t references = 0;
  int64_t filled_slots = 0;
  int64_t used = 0;
  int64_t cached = 0;
  for (const PageState& s : pages_) {
    references += s.references;
    if (s.references > 0) {
      ++used;
      filled_slots += s.filled_slots;
    } else if (s.tag >= 0) {
      ++cached;
    }
  }
  if (references != total_references_ || filled_slots != total_filled_slots_ ||
      used != used_pages() || cached != num_cached_) {
    return false;
  }
  // The lists must agree with the counters. The count in the loop's condition
  // ends the loop if a list has a cycle.
  int64_t in_free_list = 0;
  for (int32_t p = free_head_; p >= 0 && in_free_list <= num_free_;
       p = state(PageId(p)).next) {
    const PageState& s = state(PageId(p));
    if (s.references != 0 || s.tag >= 0) return false;
    ++in_free_list;
  }
  int64_t in_cached_list = 0;
  int32_t previous = -1;
  for (int32_t p = cached_head_; p >= 0 && in_cached_list <= num_cached_;
       p = state(PageId(p)).next) {
    const PageState& s = state(PageId(p));
    if (s.references != 0 || s.tag < 0 || s.previous != previous) return false;
    previous = p;
    ++in_cached_list;
  }
  return in_free_list == num_free_ && in_cached_list == num_cached_ &&
         previous == cached_tail_;
}

}  // namespace kvasir::cache
