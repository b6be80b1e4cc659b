#include "cache/tables/block_table.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace kvasir::cache {

void BlockTable::AppendReleased(int64_t count) {
  KVASIR_CHECK(entries_.empty() && count >= 0);
  entries_.resize(static_cast<size_t>(count));
  first_live_ = count;
}

void BlockTable::Append(PagePin page) {
  KVASIR_CHECK(static_cast<bool>(page));
  entries_.push_back(std::move(page));
}

void BlockTable::SetFound(int64_t tokens) {
  KVASIR_CHECK(logical_tokens_ == 0 && tokens == num_entries() * page_tokens_);
  logical_tokens_ = tokens;
  next_slot_ = tokens;
}

void BlockTable::Advance(int64_t tokens) {
  KVASIR_CHECK(tokens >= 0 && MissingEntries(tokens) == 0);
  logical_tokens_ += tokens;
  next_slot_ += tokens;
}

void BlockTable::SetLengthsOf(const BlockTable& other) {
  SetLengths(other.logical_tokens_, other.next_slot_);
}

void BlockTable::SetLengths(int64_t logical_tokens, int64_t next_slot) {
  logical_tokens_ = logical_tokens;
  next_slot_ = next_slot;
}

int64_t BlockTable::Compact(int64_t kept) {
  KVASIR_CHECK(first_live_ == 0 && kept >= 1 && kept <= next_slot_);
  const int64_t before = num_entries();
  const int64_t entries = (kept + page_tokens_ - 1) / page_tokens_;
  while (num_entries() > entries) entries_.pop_back();
  next_slot_ = kept;
  sent_entries_ = std::min(sent_entries_, entries);
  return before - entries;
}

int64_t BlockTable::ReleaseFront(int64_t first_live) {
  KVASIR_CHECK(first_live <= num_entries() &&
               first_live * page_tokens_ <= next_slot_);
  const int64_t before = first_live_;
  for (; first_live_ < first_live; ++first_live_) {
    entries_[static_cast<size_t>(first_live_)].Reset();
  }
  return first_live_ - before;
}

void BlockTable::Clear() {
  while (!entries_.empty()) entries_.pop_back();
  first_live_ = 0;
}

int64_t BlockTable::MissingEntries(int64_t tokens) const {
  const int64_t want = (next_slot_ + tokens + page_tokens_ - 1) / page_tokens_;
  return std::max<int64_t>(0, want - num_entries());
}

int64_t BlockTable::TakeDelta(
    PageGroupId group,
    google::protobuf::RepeatedPtrField<kvasir::v1::BlockTableDelta>* out) {
  if (announced_ && sent_entries_ == num_entries() &&
      sent_first_live_ == first_live_) {
    return 0;
  }
  kvasir::v1::BlockTableDelta* delta = out->Add();
  delta->set_page_group(static_cast<uint32_t>(group.value()));
  delta->set_reset(!announced_);
  delta->set_first_live_index(static_cast<uint32_t>(first_live_));
  const int64_t sent = num_entries() - sent_entries_;
  for (; sent_entries_ < num_entries(); ++sent_entries_) {
    delta->add_appended_pages(page(sent_entries_).value());
  }
  announced_ = true;
  sent_first_live_ = first_live_;
  return sent;
}

}  // namespace kvasir::cache
