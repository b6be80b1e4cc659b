// The page pools of all groups, together with the index that finds pages by
// their tokens. PrefixCache determines which pages a prompt can reuse and which
// pages a sequence publishes. If a pool has no free page, it also chooses the
// cached page that is evicted.
//
// If sequences own side pages (for exact windows), a prefix is found only up to
// a tail. A tail is a copy of the side pages of a sequence that had committed
// exactly the tokens up to there. tail_policy.h decides where tails are made.
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

// The longest prefix of a prompt that can be taken from the cache.
struct PrefixHit {
  std::vector<PrefixNodeId> nodes;  // one for each page of the prefix
  // The number of whole pages of the prompt that the index has. `nodes` may
  // have fewer, because a sequence with side pages can continue only from a
  // tail.
  int64_t num_pages = 0;
};

// A sequence's position in the prefix index, and its tokens that are not
// published yet.
struct PrefixChain {
  bool publishes = false;
  // The node of the sequence's last full page. Empty after a page could not be
  // published.
  PrefixRef chain;
  TailPolicy tails;
  // The node of the sequence's newest tail, if its next tail will replace it
  // (TailKind::kGivesWay). The index may have dropped this tail.
  PrefixRef tail_that_gives_way;
  // Tokens of the last, partly filled page; empty unless `publishes`.
  std::vector<int32_t> page_token_ids;
};

// Owns: the device pools of all page groups and the prefix index.
// Threads: used only by the scheduler thread.
// Errors: callers must check first that there are enough pages; misuse is a
// CHECK.
class PrefixCache {
 public:
  // `counts` and `config` must outlive this object. If `hasher` is null, the
  // cache makes one with MakePrefixHasher(config.cache_id).
  PrefixCache(const KvCacheConfig& config, std::unique_ptr<PrefixHasher> hasher,
              KvCacheStats* counts);
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  size_t num_groups() const { return pools_.size(); }
  PagePool& pool(size_t group) { return *pools_[group]; }
  const PagePool& pool(size_t group) const { return *pools_[group]; }
  const PrefixIndex& index() const { return *index_; }

  // Returns the only reference to a free page. If no page is free, the oldest
  // cached page is evicted for it; there must be a free or a cached page
  // (CHECK).
  PagePin Allocate(size_t group);
  // Removes a page from the index, so that no prompt finds it.
  void Forget(size_t group, PageId page) {
    index_->Forget(GroupIdOf(group), page);
  }
  // Makes every cached page free.
  void DropAll();

  // Finds the longest cached prefix that leaves at least one token to compute.
  // Adds the number of computed hashes to `page_hashes`.
  PrefixHit Find(absl::Span<const int32_t> token_ids,
                 const StartOptions& options, int64_t* page_hashes) const;
  // The nodes of the full pages of these tokens, up to the first page that is
  // not in the index. A node may have a page in some groups and none in others.
  std::vector<PrefixNodeId> FindPages(absl::Span<const int32_t> token_ids,
                                      const StartOptions& options) const;
  PageId page(PrefixNodeId node, size_t group) const {
    return index_->page(node, GroupIdOf(group));
  }
  // The first page that the token after `num_pages` full pages attends to.
  int64_t FirstVisiblePage(size_t group, int64_t num_pages) const;

  // Decides whether the sequence publishes pages. If it does, its chain starts
  // at the salt's root.
  void StartChain(const StartOptions& options, PrefixChain* out);
  // Makes `node` the end of the sequence's chain.
  void Continue(PrefixNodeId node, PrefixChain* out) {
    out->chain = index_->Ref(node);
  }
  // Returns the chain for a fork. tail_that_gives_way stays with the parent.
  PrefixChain Fork(const PrefixChain& parent);
  // Adds committed tokens to the chain and publishes each page that they fill.
  // `page_of(group, index)` returns the page's id; `first_page` is the index of
  // the page that is now being filled.
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

  // Publishes a tail at the end of the chain if the sequence's TailPolicy wants
  // one after `logical_tokens` and there are pages for it. Returns the tail's
  // pages, or null if no tail was published. The caller must immediately list
  // copies of the sequence's side pages into these pages.
  const TailPages* PublishTail(int64_t logical_tokens, PrefixChain* sequence);
  const TailPages& tail(PrefixNodeId node) const { return index_->tail(node); }
  void KeepTail(PrefixNodeId node) { index_->KeepTail(node); }
  // Drops the tail to which a page belongs, if there is one.
  void ForgetTailOf(size_t group, PageId page);
  // Makes all tails of the chain the newest ones. Call it after the sequence's
  // token pages were released, so that the tails are not evicted before
  // these pages.
  void WarmTails(const PrefixRef& chain);

 private:
  bool EvictForIndex();
  void PublishPage(int64_t index, PrefixChain* sequence);
  bool MakeRoomForTail(PrefixChain* sequence);
  std::vector<std::vector<PagePin>> AllocateTail();

  const KvCacheConfig& config_;
  const bool has_side_pages_;
  const std::unique_ptr<PrefixHasher> hasher_;
  std::vector<std::unique_ptr<PagePool>> pools_;  // indexed by PageGroupId
  std::unique_ptr<PrefixIndex> index_;
  // The pages that PublishPage publishes, indexed by PageGroupId.
  std::vector<PageId> pages_to_publish_;
  KvCacheStats& counts_;
};

}  // namespace kvasir::cache
