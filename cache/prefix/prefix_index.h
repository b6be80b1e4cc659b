// Finds pages by the tokens that they hold and all tokens before them. The
// index is a tree with one root for each salt. A node is a full page of tokens:
// its token ids, and its page in each group (or none).
//
//   root("tenant a") -- [17 4 9 2] -- [8 8 1 5]
//                          `--------- [3 0 6 6]
//
// A node is looked up by hash, and used only if its parent and its token ids
// are equal to those asked for. So a hash collision is a miss. A node that has
// lost its pages is kept as long as it has children or a sequence publishes
// pages below it.
//
// A node may have a tail: copies of the side pages of a sequence that had
// committed exactly the node's tokens. A tail is dropped as soon as one of its
// pages, or a page of its node, is removed.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/strong_id.h"
#include "cache/layout/layout.h"
#include "cache/pages/page_pool.h"
#include "cache/prefix/prefix_hash.h"

namespace kvasir::cache {

using PrefixNodeId = base::StrongId<struct PrefixNodeTag, int32_t>;

class PrefixIndex;

// The pages of a tail, by page group. A group without side pages has an empty
// list.
using TailPages = std::vector<std::vector<PageId>>;

// A reference that keeps a node in the index. Movable, not copyable. The index
// must outlive it.
class PrefixRef {
 public:
  PrefixRef() = default;
  PrefixRef(PrefixRef&& other) noexcept
      : index_(std::exchange(other.index_, nullptr)), node_(other.node_) {}
  PrefixRef& operator=(PrefixRef&& other) noexcept {
    PrefixRef moved(std::move(other));
    std::swap(index_, moved.index_);
    std::swap(node_, moved.node_);
    return *this;
  }
  ~PrefixRef() { Reset(); }

  explicit operator bool() const { return index_ != nullptr; }
  PrefixNodeId node() const { return node_; }
  void Reset();

 private:
  friend class PrefixIndex;
  PrefixRef(PrefixIndex* index, PrefixNodeId node)
      : index_(index), node_(node) {}

  PrefixIndex* index_ = nullptr;
  PrefixNodeId node_;
};

struct PrefixIndexOptions {
  int64_t page_tokens = 0;
  // The most nodes, roots included, that may exist at once. This limits the
  // index's memory.
  int64_t max_nodes = 0;
};

// Owns: the tree's nodes, and the tags of pages (PagePool::SetTag). The pools
// own the pages themselves.
// Threads: used only by the scheduler thread.
// Errors: if a node is not found or there is no room for it, functions return
// an invalid id or an empty reference. Misuse is a CHECK.
class PrefixIndex {
 public:
  // `pools` is indexed by PageGroupId. The pools must outlive the index.
  PrefixIndex(const PrefixIndexOptions& options, std::vector<PagePool*> pools);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // The root of a salt. FindRoot returns an invalid id if there is none yet.
  // TakeRoot adds it if necessary, and returns an empty reference if there is
  // no room.
  PrefixNodeId FindRoot(absl::string_view salt) const;
  PrefixRef TakeRoot(absl::string_view salt, const PrefixHash& hash);

  // The child of `parent` with these token ids. Returns an invalid id if there
  // is none, or if another node has the same hash.
  PrefixNodeId FindChild(PrefixNodeId parent, const PrefixHash& hash,
                         absl::Span<const int32_t> token_ids) const;

  // Finds or adds the child of `parent` with these token ids, and gives it the
  // pages (by group) that it lacks. If the node already has a page in a group,
  // it keeps this page, and the new page stays private to its sequence. Returns
  // an empty reference if another node has the same hash, or if there is no
  // room.
  struct NewPage {
    PrefixNodeId parent;
    PrefixHash hash;
    absl::Span<const int32_t> token_ids;
    absl::Span<const PageId> pages;
  };
  PrefixRef Publish(const NewPage& page);
  // True if Publish would fail only because there is no room for a node.
  bool LacksRoomFor(const NewPage& page) const {
    return num_nodes_ == options_.max_nodes && !by_hash_.contains(page.hash);
  }

  PrefixRef Ref(PrefixNodeId node);

  // The node's page in the group. Invalid if it has none.
  PageId page(PrefixNodeId node, PageGroupId group) const;
  const PrefixHash& hash(PrefixNodeId node) const;

  // Removes the group's oldest cached page from the index, so that it becomes
  // free. Returns the number of removed pages, as Forget does; 0 if no page is
  // cached.
  int64_t EvictOldest(PageGroupId group);
  // Removes a tagged page, and the tail that depends on it, from the index.
  // Returns the number of removed pages.
  int64_t Forget(PageGroupId group, PageId page);

  // Makes these pages the node's tail. They must be allocated and have no tag.
  // The node must have a page in every group, and no tail. `gives_way` is true
  // for a tail of kind TailKind::kGivesWay.
  void PublishTail(PrefixNodeId node, TailPages pages, bool gives_way);
  bool has_tail(PrefixNodeId node) const { return tail_of_.contains(node); }
  const TailPages& tail(PrefixNodeId node) const {
    return tail_of_.at(node)->pages;
  }
  // Call it when a sequence continues from the node's tail. The tail becomes
  // the newest one, and its publisher's next tail no longer replaces it.
  void KeepTail(PrefixNodeId node);
  // Makes the tails of the node and of its ancestors the newest ones. Their
  // cached pages move to the end of the pools' lists of cached pages. So they
  // are evicted together with the pages of their nodes, and not before.
  void WarmTails(PrefixNodeId node);
  // The next three functions remove tails. They return the number of pages that
  // they removed from the index.
  int64_t DropTail(PrefixNodeId node);
  int64_t DropTailThatGivesWay(PrefixNodeId node);
  int64_t DropOldestTail();

  int64_t tail_pages(PageGroupId group) const {
    return tail_pages_[static_cast<size_t>(group.value())];
  }

  int64_t num_nodes() const { return num_nodes_; }
  int64_t max_nodes() const { return options_.max_nodes; }
  int64_t metadata_bytes() const;
  // Returns INTERNAL if nodes and tags contradict each other. Walks all nodes
  // and pages.
  absl::Status CheckInvariants() const;

 private:
  friend class PrefixRef;

  struct Node {
    PrefixHash hash;
    int32_t parent = -1;     // -1: a root
    int32_t references = 0;  // the number of its children and PrefixRefs
    int32_t num_pages = 0;   // summed over the groups
    bool in_use = false;
  };
  struct Tail {
    PrefixNodeId node;
    TailPages pages;
    bool gives_way = false;
  };
  using TailList = std::list<Tail>;
  // Token ids are stored in blocks of this many nodes, so they never move.
  static constexpr int64_t kNodesPerBlock = 64;

  Node& node(PrefixNodeId id) {
    return nodes_[static_cast<size_t>(id.value())];
  }
  const Node& node(PrefixNodeId id) const {
    return nodes_[static_cast<size_t>(id.value())];
  }
  PageId& page_slot(PrefixNodeId id, PageGroupId group) {
    return pages_[static_cast<size_t>(id.value()) * pools_.size() +
                  static_cast<size_t>(group.value())];
  }
  int32_t* tokens(PrefixNodeId id) const;
  PrefixNodeId NewNode(PrefixNodeId parent, const PrefixHash& hash);
  void Unreference(PrefixNodeId id);
  // Removes the node, and then its ancestors, up to the first node that is
  // still needed.
  void Prune(PrefixNodeId id);
  void MakeNewest(TailList::iterator tail);
  // Checks the tails and adds their pages to `tagged`.
  absl::Status CheckTails(int64_t* tagged) const;

  const PrefixIndexOptions options_;
  const std::vector<PagePool*> pools_;
  std::vector<Node> nodes_;
  std::vector<PageId> pages_;  // [nodes, groups]
  std::vector<std::unique_ptr<int32_t[]>> token_blocks_;
  std::vector<PrefixNodeId> unused_;
  int64_t num_nodes_ = 0;
  absl::flat_hash_map<PrefixHash, PrefixNodeId> by_hash_;  // nodes except roots
  absl::flat_hash_map<std::string, PrefixNodeId> roots_;
  // the salt of each root
  absl::flat_hash_map<PrefixNodeId, std::string> salts_;
  TailList tails_;  // oldest first
  absl::flat_hash_map<PrefixNodeId, TailList::iterator> tail_of_;
  std::vector<int64_t> tail_pages_;  // number of pages in all tails, by group
};

}  // namespace kvasir::cache
