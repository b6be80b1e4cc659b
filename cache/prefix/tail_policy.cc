#include "cache/prefix/tail_policy.h"

#include <algorithm>

namespace kvasir::cache {
namespace {

// Tails may take one of every four pages of a pool. The other pages are left
// for tokens, because a tail helps at only one position of a text.
constexpr int64_t kPagesPerTailPage = 4;

}  // namespace

TailPolicy::TailPolicy(const TailLookup& lookup)
    : page_tokens_(lookup.page_tokens), num_tokens_(lookup.num_tokens) {
  const int64_t last = num_tokens_ - num_tokens_ % page_tokens_;
  if (lookup.paged_tokens > lookup.found_tokens) {
    cut_tokens_ = lookup.paged_tokens;
  } else if (last > lookup.found_tokens) {
    cut_tokens_ = last;
  }
}

TailKind TailPolicy::At(int64_t tokens) const {
  if (page_tokens_ == 0 || tokens % page_tokens_ != 0) return TailKind::kNone;
  if (tokens > num_tokens_) return TailKind::kGivesWay;
  // The last boundary gets a tail as well if a step ends there anyway, because
  // no additional step is needed then.
  const bool is_last = tokens + page_tokens_ > num_tokens_;
  return tokens == cut_tokens_ || is_last ? TailKind::kStays : TailKind::kNone;
}

int64_t MaxTailPages(int64_t num_pages, int64_t pages_per_tail) {
  return std::max(num_pages / kPagesPerTailPage, pages_per_tail);
}

}  // namespace kvasir::cache
