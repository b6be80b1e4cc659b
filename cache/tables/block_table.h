// Which page holds which slots of one sequence in one page group, and how many
// tokens it has seen and holds.
//
//   entries:  | released (no page) |   live pages   |
//             0                first_live       num_entries
//   slots:    0       first_live * P   next_slot     num_entries * P
//
// next_slot is where the next token goes. Logical length counts tokens seen and
// only grows; the physical length, next_slot - first_live * P, counts slots
// held. Where slots are evicted, next_slot falls behind the logical length.
#pragma once

#include <cstdint>
#include <vector>

#include "cache/layout/layout.h"
#include "cache/pages/page_pool.h"
#include "google/protobuf/repeated_field.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::cache {

// Owns: one reference to each live page.
// Threads: scheduler thread only.
// Errors: misuse is a CHECK.
class BlockTable {
 public:
  explicit BlockTable(int64_t page_tokens) : page_tokens_(page_tokens) {}
  // Moved from: an empty table. Destroyed: pages go, the last one first, so
  // that a chain of cached pages is evicted from its end.
  BlockTable(BlockTable&&) = default;
  BlockTable& operator=(BlockTable&&) = delete;
  ~BlockTable() { Clear(); }

  // An entry that names no page, before anything else: what a prefix hit leaves
  // behind the window.
  void AppendReleased(int64_t count);
  void Append(PagePin page);

  // Tokens found by a prefix: seen and held, as far as entries are live. All
  // entries are full.
  void SetFound(int64_t tokens);
  // Tokens written into the slots from next_slot on, which entries hold.
  void Advance(int64_t tokens);
  // Copies of lengths, for a fork and for an image: `next_slot` need not have
  // an entry yet.
  void SetLengthsOf(const BlockTable& other);
  void SetLengths(int64_t logical_tokens, int64_t next_slot);

  // Of the slots, the first `kept` hold all that stays (1 .. next_slot): the
  // next token goes behind them, and entries behind them go. No entry may have
  // been given up at the front. Returns how many pages went.
  int64_t Compact(int64_t kept);

  // Gives up pages below `first_live` (no more than num_entries); those at or
  // above stay. Returns how many pages went.
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
  // Invalid for a released entry.
  PageId page(int64_t index) const {
    return entries_[static_cast<size_t>(index)].page();
  }
  // Entries to append before `tokens` more slots are there.
  int64_t MissingEntries(int64_t tokens) const;

  // Appends the change since the last call, if any; the first one is a reset.
  // Returns the number of entries that it carries.
  int64_t TakeDelta(
      PageGroupId group,
      google::protobuf::RepeatedPtrField<kvasir::v1::BlockTableDelta>* out);

  int64_t metadata_bytes() const {
    return static_cast<int64_t>(entries_.capacity() * sizeof(PagePin));
  }

 private:
  int64_t page_tokens_;
  std::vector<PagePin> entries_;  // an empty pin: released
  int64_t first_live_ = 0;
  int64_t next_slot_ = 0;
  int64_t logical_tokens_ = 0;
  // What the executor knows.
  bool announced_ = false;
  int64_t sent_entries_ = 0;
  int64_t sent_first_live_ = 0;
};

}  // namespace kvasir::cache
