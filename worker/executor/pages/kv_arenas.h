// The memory of the cache's pages: one block of memory (arena) for each layer.
// The host pool, which keeps the pages of preempted sequences, has another
// arena for each layer.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/layout/layout.h"
#include "kernels/attention/params/paged_attention.h"
#include "kernels/device/allocator.h"
#include "kernels/device/stream.h"
#include "kernels/device/workspace.h"
#include "kernels/latents/copy_pages.h"
#include "kernels/latents/latent_view.h"
#include "kernels/latents/slot_metadata.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/step_plan.pb.h"

namespace kvasir::worker {

// Owns: the arenas of all layers, in one allocation under the tag "kv_cache";
//   the arenas of the host pool, under the tag "host_pool"; and the tables that
//   the views point to.
// Threads: one at a time.
class KvArenas {
 public:
  // One part of a side (keys or values) of a layer. A part may be moved but not
  // copied, because its views point into its vectors.
  struct Part {
    Part() = default;
    Part(Part&&) = default;
    Part& operator=(Part&&) = default;

    // Only for values: true if they are stored in the last key part (a joint
    // part).
    bool of_keys = false;
    kernels::LatentPart latents;
    std::vector<kernels::LatentGroup> groups;
    std::vector<std::vector<kernels::CodeRun>> runs;  // one list for each group
    // The layout of an exact (uncompressed) row, if the part keeps exact rows.
    // Offsets are relative to `exact.arena`.
    kernels::LatentPart exact;
    std::vector<kernels::LatentGroup> exact_groups;
    // If the layer evicts: for each latent group, its eviction unit in
    // Layer::metadata. [groups]
    std::vector<int32_t> unit_of_group;
  };
  // Where the exact rows of a sequence's sinks and latest tokens lie in its
  // side pages. Several layers of a page group may share one Ring. Addresses
  // are relative to the first arena that holds any of the rows.
  struct Ring {
    int64_t page_group = 0;
    int64_t sinks = 0;
    int64_t window = 0;
    int64_t row_bytes = 0;
    std::vector<kernels::ExactSegment> segments;

    // Returns this ring in the form that ops take. The result points into this
    // ring.
    kernels::ExactSlots slots() const {
      return {sinks,           window,
              window,          row_bytes,
              segments.data(), static_cast<int64_t>(segments.size())};
    }
    friend bool operator==(const Ring&, const Ring&) = default;
  };
  struct Layer {
    int64_t page_group = 0;
    std::vector<Part> key;
    std::vector<Part> value;
    int64_t key_ring = -1;  // index in rings(); negative: no exact rows
    int64_t value_ring = -1;
    // Has no eviction units (sets of KV heads that evict the same tokens) if
    // the layer evicts nothing.
    kernels::SlotMetadata metadata;
    // For each KV head of this rank, its eviction unit.
    std::vector<int32_t> unit_of_head;
  };

  // `plan` is the plan that the layout was made for. `pages` and `host_pages`
  // count pages by page group; empty `host_pages` means no host pool. Create
  // touches all memory, so that the operating system really provides it. The
  // views have no static ranges of codes; the caller must add them. Returns the
  // errors of layout and allocator.
  static absl::StatusOr<KvArenas> Create(
      const plan::ResolvedPlan& plan, const cache::PageLayout& layout,
      const cache::PageCounts& pages, kernels::DeviceAllocator* allocator,
      const cache::PageCounts& host_pages = {});

  const std::vector<Layer>& layers() const { return layers_; }
  // All different rings: layers with equal rings share one element.
  const std::vector<Ring>& rings() const { return rings_; }
  const cache::PageCounts& num_pages() const { return pages_; }
  int64_t num_page_groups() const {
    return static_cast<int64_t>(pages_.size());
  }

  // Whether the layers of the group evict slots.
  bool evicts(int64_t group) const {
    return evicts_[static_cast<size_t>(group)];
  }

  // The bytes of one token in all layers, including its share of the pages'
  // padding.
  double bytes_per_token() const { return bytes_per_token_; }

  // The bytes of one page in all layers of the group together. The memory under
  // the tag "kv_cache" is exactly the sum of num_pages() * page_bytes() over
  // all groups.
  int64_t page_bytes(int64_t group) const {
    return page_bytes_[static_cast<size_t>(group)];
  }

  // INVALID_ARGUMENT for a group or page that does not exist.
  absl::Status CheckPage(uint32_t page_group, int32_t page) const;
  absl::Status CheckHostPage(uint32_t page_group, int32_t page) const;

  // Copy host pages to `bytes`, or `bytes` to host pages. The order is page by
  // page, and in each page layer by layer. INVALID_ARGUMENT unless `bytes` has
  // exactly the size of these pages; also the errors of CheckHostPage.
  absl::Status ReadHostPages(kernels::Stream& stream, int64_t group,
                             absl::Span<const int32_t> pages,
                             absl::Span<char> bytes) const;
  absl::Status WriteHostPages(kernels::Stream& stream, int64_t group,
                              absl::Span<const int32_t> pages,
                              absl::Span<const char> bytes) const;

  // Returns [units, num_slots]: for each eviction unit, the text positions of
  // the tokens in a sequence's slots. Only layers that evict store positions.
  // `pages` are the sequence's pages in order. INVALID_ARGUMENT for a layer
  // that does not evict and for slots beyond the pages; also the errors of
  // CheckPage.
  absl::StatusOr<std::vector<uint32_t>> ReadPositions(
      kernels::Stream& stream, int64_t layer, absl::Span<const int32_t> pages,
      int64_t num_slots) const;

  // A step's page copies, in batches. Within a batch no copy reads or writes a
  // page that another copy writes, so one launch can execute a batch. Each
  // batch is padded to a power of two with pairs that copy nothing, so that few
  // different sizes occur.
  enum class CopyKind : uint8_t { kWithin, kToHost, kFromHost };
  struct CopyBatch {
    int64_t page_group = 0;
    CopyKind kind = CopyKind::kWithin;
    int64_t first = 0;  // index of its first pair in `pairs`
    int64_t count = 0;

    friend bool operator==(const CopyBatch&, const CopyBatch&) = default;
  };
  struct CopyList {
    std::vector<kernels::PagePair> pairs;
    std::vector<CopyBatch> batches;

    void Clear() {
      pairs.clear();
      batches.clear();
    }
  };
  // Divides `copies` into batches and appends these to `list`. Launched in
  // order, they have the same effect as `copies` in order. Host work only.
  // INVALID_ARGUMENT for a copy within the host pool; also the errors of
  // CheckPage.
  absl::Status AddCopies(absl::Span<const kvasir::v1::PageCopy* const> copies,
                         CopyList* list) const;

  // Enqueues one batch, for all layers of its page group. `pairs` is a copy of
  // CopyList::pairs on the device.
  absl::Status Copy(kernels::Stream& stream, const CopyBatch& batch,
                    kernels::DevicePtr<const kernels::PagePair> pairs,
                    kernels::Workspace& workspace) const;

 private:
  KvArenas() = default;
  kernels::DevicePtr<void> arena(size_t layer) const {
    return (memory_.as<char>() + arena_offsets_[layer]).as<void>();
  }
  int64_t RingOf(const cache::PageLayout& layout, int64_t page_group,
                 const cache::ExactRing& rows);
  absl::Status CheckCopy(const kvasir::v1::PageCopy& copy) const;
  // Visits each page in each layer: calls visit(the page's memory, its offset
  // in the caller's buffer, its size). `num_bytes` is the size of that buffer.
  template <typename Visit>
  absl::Status ForHostPages(int64_t group, absl::Span<const int32_t> pages,
                            size_t num_bytes, const Visit& visit) const;

  cache::PageCounts pages_;
  std::vector<int64_t> page_bytes_;  // by page group
  std::vector<bool> evicts_;         // by page group
  double bytes_per_token_ = 0;
  std::vector<Layer> layers_;
  std::vector<Ring> rings_;
  kernels::DeviceBuffer memory_;
  std::vector<int64_t> arena_offsets_;  // by layer, in `memory_`
  cache::PageCounts host_pages_;        // by page group; 0: no host pool
  std::vector<kernels::DeviceBuffer> host_buffers_;  // by layer
};

}  // namespace kvasir::worker
