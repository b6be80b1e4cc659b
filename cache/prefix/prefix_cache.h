// The page pools of all groups, together with the index that finds their pages
// by the tokens that they hold: what a prompt can reuse, what a sequence
// publishes, and which cached page goes if a pool has no free one.
//
// If sequences own side pages (exact windows), a prefix is found only up to a
// tail: a copy of the side pages of a sequence that had committed exactly these
// tokens. tail_policy.h decides which boundaries get one.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cache/pages/kv_cache_config.h"
#include "cache/pages/kv_cache_stats.h"
#include "cache/pages/page_pool.h"
#include "cache/prefix/prefix_hash.h"
#include "cache/prefix/prefix_index.h"
#include "cache/prefix/tail_policy.h"

namespace kvasir::cache {

// The longest prefix of a prompt that the index can serve.
struct PrefixHit {
  std::vector<PrefixNodeId> nodes;  // by page
  // Whole pages that the index has. If sequences need a tail, it can be more
  // than `nodes`.
  int64_t num_pages = 0;
};

// Where one sequence stands in the index, and what it publishes there.
struct PrefixChain {
  bool publishes = false;
  // The node of the last full page. Empty once a page could not be published.
  PrefixRef chain;
  TailPolicy tails;
  // The node of the sequence's newest tail that gives way, while it exists.
  PrefixRef tail_that_gives_way;
  // Tokens of the last, partly filled page; empty unless `publishes`.
  std::vector<int32_t> page_token_ids;
};

// Owns: the device pools of all page groups and the prefix index.
// Threads: scheduler thread only.
// Errors: "no pages" is the caller's to check first; misuse is a CHECK.
class PrefixCache {
 public:
  // `counts` and `config` outlive it. A null `hasher` means the keyed hash
  // under config.cache_id.
  PrefixCache(const KvCacheConfig& config, std::unique_ptr<PrefixHasher> hasher,
              KvCacheStats* counts);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  size_t num_groups() const { return pools_.size(); }
  PagePool& pool(size_t group) { return *pools_[group]; }
  const PagePool& pool(size_t group) const { return *pools_[group]; }
  const PrefixIndex& index() const { return *index_; }

  // A page with one reference. If no page is free, the oldest cached one is
  // forgotten; one of the two must exist (CHECK).
  PagePin Allocate(size_t group);
  // Makes a page that an index node holds unfindable.
  void Forget(size_t group, PageId page) {
    index_->Forget(GroupIdOf(group), page);
  }
  // Makes every cached page free.
  void DropAll();

  // Counts its hashes in `page_hashes`; at least one token is left to compute.
  PrefixHit Find(absl::Span<const int32_t> token_ids,
                 const StartOptions& options, int64_t* page_hashes) const;
  // The nodes of the full pages of these tokens, as far as the index has them.
  // Each may have a page in some groups and none in others.
  std::vector<PrefixNodeId> FindPages(absl::Span<const int32_t> token_ids,
                                      const StartOptions& options) const;
  PageId page(PrefixNodeId node, size_t group) const {
    return index_->page(node, GroupIdOf(group));
  }
  // The first page that the token after `num_pages` full pages sees.
  int64_t FirstVisiblePage(size_t group, int64_t num_pages) const;

  // Decides whether the sequence publishes, and makes the salt's root its
  // chain.
  void StartChain(const StartOptions& options, PrefixChain* out);
  // The chain goes on from `node`.
  void Continue(PrefixNodeId node, PrefixChain* out) {
    out->chain = index_->Ref(node);
  }
  // A copy for a fork. Tails that give way stay with the parent.
  PrefixChain Fork(const PrefixChain& parent);
  // Adds committed tokens. Publishes each page that they fill, with the ids
  // that `page_of(group, index)` returns; `first_page` is the index of the page
  // that is now being filled.
  template <typename PageOf>
  void Publish(absl::Span<const int32_t> token_ids, int64_t first_page,
               PageOf&& page_of, PrefixChain* sequence) {
    if (!sequence->publishes) return;
    for (const int32_t token : token_ids) {
      sequence->page_token_ids.push_back(token);
      if (static_cast<int64_t>(sequence->page_token_ids.size()) <
          config_.page_tokens) {
        continue;
      }
      for (size_t g = 0; g < pools_.size(); ++g) {
        pages_to_publish_[g] = page_of(g, first_page);
      }
      PublishPage(first_page++, sequence);
      sequence->page_token_ids.clear();
    }
  }

  // Pages for a tail at the end of the chain, if the policy wants one after
  // `logical_tokens` and pages can be had; else null. The caller lists copies
  // of the sequence's side pages into them before anything else changes.
  const TailPages* PublishTail(int64_t logical_tokens, PrefixChain* sequence);
  const TailPages& tail(PrefixNodeId node) const { return index_->tail(node); }
  void KeepTail(PrefixNodeId node) { index_->KeepTail(node); }
  // Forgets the tail that a page belongs to, if any.
  void ForgetTailOf(size_t group, PageId page);
  // Call after the sequence's token pages were released: tails go together with
  // these pages and not before them.
  void WarmTails(const PrefixRef& chain);

 private:
  bool EvictForIndex();
  void PublishPage(int64_t index, PrefixChain* sequence);
  bool MakeRoomForTail(PrefixChain* sequence);
  std::vector<std::vector<PagePin>> AllocateTail();

  const KvCacheConfig& config_;
  const bool has_side_pages_;
  const std::unique_ptr<PrefixHasher> hasher_;
  std::vector<std::unique_ptr<PagePool>> pools_;  // by PageGroupId
  std::unique_ptr<PrefixIndex> index_;
  std::vector<PageId> pages_to_publish_;  // by group; reused between calls
  KvCacheStats& counts_;
};

}  // namespace kvasir::cache
