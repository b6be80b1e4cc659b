// Finds pages by the tokens they hold and all tokens before them: a tree whose
// nodes are full pages of tokens, one root per salt.
//
//   root("tenant a") -- [17 4 9 2] -- [8 8 1 5]      node: token ids, and a
//   page
//                          `--------- [3 0 6 6]       of each group, or none
//
// A node is looked up by hash and believed only when its parent and its token
// ids are the ones asked for: a hash collision is a miss. A node outlives its
// pages while something hangs on it (children, or a sequence that publishes
// below it).
//
// A node may have a tail: pages with what a sequence held beside its tokens
// when exactly the node's tokens were committed (its side pages). A tail goes
// with any of its pages, and with any page of its node.
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

// Of a tail, by page group; empty for a group without side pages.
using TailPages = std::vector<std::vector<PageId>>;

// Keeps a node alive. Movable, not copyable; the index outlives it.
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
  // Nodes, roots included, that may exist at once: bounds the memory.
  int64_t max_nodes = 0;
};

// Owns: nodes and the tags of the pools' pages. Pages are the pools'.
// Threads: scheduler thread only.
// Errors: not found and "no room" are invalid ids; misuse is a CHECK.
class PrefixIndex {
 public:
  // `pools` by PageGroupId; they outlive the index.
  PrefixIndex(const PrefixIndexOptions& options, std::vector<PagePool*> pools);
  PrefixIndex(const PrefixIndex&) = delete;
  PrefixIndex& operator=(const PrefixIndex&) = delete;

  // The root of a salt. Find: invalid when there is none yet. Take: makes it;
  // an empty reference when there is no room.
  PrefixNodeId FindRoot(absl::string_view salt) const;
  PrefixRef TakeRoot(absl::string_view salt, const PrefixHash& hash);

  // The child of `parent` with these token ids; invalid when there is none,
  // also when another node has the hash.
  PrefixNodeId FindChild(PrefixNodeId parent, const PrefixHash& hash,
                         absl::Span<const int32_t> token_ids) const;

  // Adds the child of `parent` with these token ids, or takes the one there is,
  // and gives it the pages (by group) that it lacks. A page that it has already
  // stays; the other one remains its sequence's own. Empty when another node
  // has the hash, or when there is no room.
  struct NewPage {
    PrefixNodeId parent;
    PrefixHash hash;
    absl::Span<const int32_t> token_ids;
    absl::Span<const PageId> pages;
  };
  PrefixRef Publish(const NewPage& page);
  // Publish would fail, and only for want of a node.
  bool LacksRoomFor(const NewPage& page) const {
    return num_nodes_ == options_.max_nodes && !by_hash_.contains(page.hash);
  }

  PrefixRef Ref(PrefixNodeId node);

  // Invalid when the node has none in the group.
  PageId page(PrefixNodeId node, PageGroupId group) const;
  const PrefixHash& hash(PrefixNodeId node) const;

  // Forgets the group's oldest cached page, which becomes free. Returns how
  // many pages were forgotten, as Forget does; 0 when none is cached.
  int64_t EvictOldest(PageGroupId group);
  // Forgets a tagged page, and the tail that goes with it. Returns how many
  // pages were forgotten.
  int64_t Forget(PageGroupId group, PageId page);

  // Gives the node a tail in these pages, which are used and untagged. It must
  // have its own pages in all groups, and no tail.
  void PublishTail(PrefixNodeId node, TailPages pages, bool gives_way);
  bool has_tail(PrefixNodeId node) const { return tail_of_.contains(node); }
  const TailPages& tail(PrefixNodeId node) const {
    return tail_of_.at(node)->pages;
  }
  // Somebody goes on from the tail: it gives way no longer, and is the newest.
  void KeepTail(PrefixNodeId node);
  // The node's tail and those of its ancestors become the newest: what is
  // cached of them lies behind all cached pages, and so goes with its node's
  // pages and not before them.
  void WarmTails(PrefixNodeId node);
  // Each returns how many pages were forgotten.
  int64_t DropTail(PrefixNodeId node);
  int64_t DropTailThatGivesWay(PrefixNodeId node);
  int64_t DropOldestTail();
  int64_t tail_pages(PageGroupId group) const {
    return tail_pages_[static_cast<size_t>(group.value())];
  }

  int64_t num_nodes() const { return num_nodes_; }
  int64_t max_nodes() const { return options_.max_nodes; }
  int64_t metadata_bytes() const;
  // INTERNAL when nodes and tags contradict each other. Walks everything.
  absl::Status CheckInvariants() const;

 private:
  friend class PrefixRef;

  struct Node {
    PrefixHash hash;
    int32_t parent = -1;     // -1: a root
    int32_t references = 0;  // children and PrefixRefs
    int32_t num_pages = 0;   // over the groups
    bool in_use = false;
  };
  struct Tail {
    PrefixNodeId node;
    TailPages pages;
    bool gives_way = false;
  };
  using TailList = std::list<Tail>;
  // Token ids lie in blocks of this many nodes, so that they never move.
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
  // Removes the node, and then its ancestors, as far as nothing needs them.
  void Prune(PrefixNodeId id);
  void MakeNewest(TailList::iterator tail);
  // Adds the tails' pages to `tagged`.
  absl::Status CheckTails(int64_t* tagged) const;

  const PrefixIndexOptions options_;
  const std::vector<PagePool*> pools_;
  std::vector<Node> nodes_;
  std::vector<PageId> pages_;  // [nodes, groups]
  std::vector<std::unique_ptr<int32_t[]>> token_blocks_;
  std::vector<PrefixNodeId> unused_;
  int64_t num_nodes_ = 0;
  absl::flat_hash_map<PrefixHash, PrefixNodeId> by_hash_;  // without roots
  absl::flat_hash_map<std::string, PrefixNodeId> roots_;
  absl::flat_hash_map<PrefixNodeId, std::string> salts_;  // of roots
  TailList tails_;                                        // oldest first
  absl::flat_hash_map<PrefixNodeId, TailList::iterator> tail_of_;
  std::vector<int64_t> tail_pages_;  // by group: in all tails
};

}  // namespace kvasir::cache
