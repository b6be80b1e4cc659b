// The block table of one sequence in one page group: which page holds which
// slots, how many tokens the sequence has seen and how many slots it holds. P
// is the number of slots of a page.
//
//   entries:  | released (no page) |   live pages   |
//             0                first_live       num_entries
//   slots:    0       first_live * P   next_slot     num_entries * P
//
// The next token goes to next_slot. The logical length counts the tokens seen
// and only grows. The physical length, next_slot - first_live * P, counts the
// slots held. If slots were evicted, next_slot is below the logical length.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/layout/layout.h"
#include "cache/pages/page_pool.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::cache {

// Owns: one reference to each live page.
// Threads: used only by the scheduler thread.
// Errors: misuse is a CHECK.
class BlockTable {
 public:
  explicit BlockTable(int64_t page_tokens) : page_tokens_(page_tokens) {}
  // A table that was moved from is empty. The destructor releases the pages
  // from the last one to the first, so that cached pages at the end of a
  // sequence are evicted first.
  BlockTable(BlockTable&&) = default;
  BlockTable& operator=(BlockTable&&) = delete;
  ~BlockTable() { Clear(); }

  // Appends entries without a page to an empty table. They stand for the pages
  // of a prefix hit that are outside the sliding window.
  void AppendReleased(int64_t count);
  void Append(PagePin page);

  // Sets the lengths after a prefix hit of `tokens` tokens, which fill all
  // entries.
  void SetFound(int64_t tokens);
  // Records that `tokens` tokens were written into the slots from next_slot on.
  // Entries for these slots must exist.
  void Advance(int64_t tokens);
  // Set the lengths of a fork (SetLengthsOf) or of an imported image
  // (SetLengths). The table need not have an entry for `next_slot` yet.
  void SetLengthsOf(const BlockTable& other);
  void SetLengths(int64_t logical_tokens, int64_t next_slot);

  // Shrinks the table to its first `kept` slots (1 .. next_slot), to which the
  // executor moves the slots that stay. The next token goes after these slots,
  // and the pages after them are given up. No entry may have been given up at
  // the front (CHECK). Returns the number of pages given up.
  int64_t Compact(int64_t kept);

  // Gives up the pages before entry `first_live` (at most num_entries). Returns
  // the number of pages given up.
  int64_t ReleaseFront(int64_t first_live);
  void Clear();

  int64_t logical_tokens() const { return logical_tokens_; }
  int64_t physical_tokens() const {
    return next_slot_ - first_live_ * page_tokens_;
  }
  int64_t next_slot() const { return next_slot_; }
  int64_t first_live() const { return first_live_; }
  int64_t num_entries() const { return static_cast<int64_t>(entries_.size()); }
  int64_t num_live() const { return num_entries() - first_live_; }
  // The page of an entry. Invalid if the entry was released.
  PageId page(int64_t index) const {
    return entries_[static_cast<size_t>(index)].page();
  }
  // The number of entries that must be appended before `tokens` more tokens
  // have slots.
  int64_t MissingEntries(int64_t tokens) const;

  // Appends the change since the last call to `out`, if there is one. The first
  // change is a reset. Returns the number of entries in the change.
  int64_t TakeDelta(
      PageGroupId group,
      google::protobuf::RepeatedPtrField<kvasir::v1::BlockTableDelta>* out);

  int64_t metadata_bytes() const {
    return static_cast<int64_t>(entries_.capacity() * sizeof(PagePin));
  }

 private:
  int64_t page_tokens_;
  std::vector<PagePin> entries_;  // an empty pin is a released entry
  int64_t first_live_ = 0;
  int64_t next_slot_ = 0;
  int64_t logical_tokens_ = 0;
  // These fields record what TakeDelta has already sent to the executor.
  bool announced_ = false;
  int64_t sent_entries_ = 0;
  int64_t sent_first_live_ = 0;
};

}  // namespace kvasir::cache
