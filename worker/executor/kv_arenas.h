// The bytes of the cache's pages: one arena per layer, as the layout says; and
// those of the host pool, where images of sequences wait: one more per layer.
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

// Owns: arenas [N, page_bytes(layer)] in one piece of memory under the tag
// "kv_cache" (exact rows of a side are found in several), those of the host
// pool [H, page_bytes(layer)] under "host_pool", and the tables behind the
// views.
// Threads: one at a time.
class KvArenas {
 public:
  // One part of a side. Views point into the vectors: it moves, and is not
  // copied.
  struct Part {
    Part() = default;
    Part(Part&&) = default;
    Part& operator=(Part&&) = default;

    // Of values: the pages and exact rows of the last part of the keys.
    bool of_keys = false;
    kernels::LatentPart latents;
    std::vector<kernels::LatentGroup> groups;
    std::vector<std::vector<kernels::CodeRun>> runs;  // by group
    // An exact row, where the side has some: bytes are counted from `arena`.
    kernels::LatentPart exact;
    std::vector<kernels::LatentGroup> exact_groups;
    // [groups], where the layer evicts: in Layer::metadata.
    std::vector<int32_t> unit_of_group;
  };
  // Exact rows that lie alike in the side pages of a page group, seen from the
  // first arena that has some.
  struct Ring {
    int64_t page_group = 0;
    int64_t sinks = 0;
    int64_t window = 0;
    int64_t row_bytes = 0;
    std::vector<kernels::ExactSegment> segments;

    // Points into the ring.
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
    int64_t key_ring = -1;  // in rings(); below 0: no exact rows
    int64_t value_ring = -1;
    // Where the layer evicts; else without units.
    kernels::SlotMetadata metadata;
    std::vector<int32_t> unit_of_head;  // [Hkv] of the rank
  };

  // Ranges that lie in no page are the caller's to add to the views. `plan` is
  // what the layout was made of, served by this build; `pages` by page group,
  // as the host pool's (empty: there is none); memory is touched, so that the
  // pools are really there. Layout's and allocator's errors.
  static absl::StatusOr<KvArenas> Create(
      const plan::ResolvedPlan& plan, const cache::PageLayout& layout,
      const cache::PageCounts& pages, kernels::DeviceAllocator* allocator,
      const cache::PageCounts& host_pages = {});

  const std::vector<Layer>& layers() const { return layers_; }
  // Without repetitions: layers that are alike share one.
  const std::vector<Ring>& rings() const { return rings_; }
  const cache::PageCounts& num_pages() const { return pages_; }
  int64_t num_page_groups() const {
    return static_cast<int64_t>(pages_.size());
  }

  // Whether layers of the group give up slots.
  bool evicts(int64_t group) const {
    return evicts_[static_cast<size_t>(group)];
  }

  // Bytes of a token's slots in every layer, a page's padding shared out.
  double bytes_per_token() const { return bytes_per_token_; }

  // Bytes of one page id of a group, over its layers: what "kv_cache" has
  // allocated is those of num_pages() of every group, and no more.
  int64_t page_bytes(int64_t group) const {
    return page_bytes_[static_cast<size_t>(group)];
  }

  // INVALID_ARGUMENT for a group or page that does not exist.
  absl::Status CheckPage(uint32_t page_group, int32_t page) const;
  absl::Status CheckHostPage(uint32_t page_group, int32_t page) const;

  // Host pages and bytes, page after page, each over the layers of its group:
  // `bytes` has as many as that makes (INVALID_ARGUMENT). CheckHostPage's
  // errors.
  absl::Status ReadHostPages(kernels::Stream& stream, int64_t group,
                             absl::Span<const int32_t> pages,
                             absl::Span<char> bytes) const;
  absl::Status WriteHostPages(kernels::Stream& stream, int64_t group,
                              absl::Span<const int32_t> pages,
                              absl::Span<const char> bytes) const;

  // What a layer that evicts notes of slots: the tokens' positions in the text,
  // [U, num_slots]. `pages` are a sequence's, in its order. INVALID_ARGUMENT
  // for another layer, for slots beyond the pages, CheckPage's.
  absl::StatusOr<std::vector<uint32_t>> ReadPositions(
      kernels::Stream& stream, int64_t layer, absl::Span<const int32_t> pages,
      int64_t num_slots) const;

  // Page copies of a step, cut into batches that one launch may do: no copy of
  // a batch reads or writes what another of it writes. How many batches there
  // are depends on the copies; each has a power of two of pairs, the last of
  // which copy nothing, so that few lists of batches differ.
  enum class CopyKind : uint8_t { kWithin, kToHost, kFromHost };
  struct CopyBatch {
    int64_t page_group = 0;
    CopyKind kind = CopyKind::kWithin;
    int64_t first = 0;  // in the pairs
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
  // Adds batches that one after the other do what `copies` do in their order.
  // Host memory. CheckPage's errors; INVALID_ARGUMENT for one within the host
  // pool.
  absl::Status AddCopies(absl::Span<const kvasir::v1::PageCopy* const> copies,
                         CopyList* list) const;

  // Enqueues one batch over all layers of its page group; `pairs` are those of
  // the whole list, on the device.
  absl::Status Copy(kernels::Stream& stream, const CopyBatch& batch,
                    kernels::DevicePtr<const kernels::PagePair> pairs,
                    kernels::Workspace& workspace) const;

 private:
  KvArenas() = default;
  kernels::DevicePtr<void> arena(size_t layer) const {
    return (memory_.as<char>() + arena_bytes_[layer]).as<void>();
  }
  int64_t RingOf(const cache::PageLayout& layout, int64_t page_group,
                 const cache::ExactRing& rows);
  absl::Status CheckCopy(const kvasir::v1::PageCopy& copy) const;
  // Calls visit(memory, offset in `num_bytes`, bytes) for each page and layer.
  template <typename Visit>
  absl::Status ForHostPages(int64_t group, absl::Span<const int32_t> pages,
                            size_t num_bytes, const Visit& visit) const;

  cache::PageCounts pages_;
  std::vector<int64_t> page_bytes_;  // by page group
  std::vector<bool> evicts_;         // likewise
  double bytes_per_token_ = 0;
  std::vector<Layer> layers_;
  std::vector<Ring> rings_;
  kernels::DeviceBuffer memory_;
  std::vector<int64_t> arena_bytes_;  // by layer: where in `memory_` it begins
  cache::PageCounts host_pages_;      // of each group; 0: none
  std::vector<kernels::DeviceBuffer> host_buffers_;  // by layer
};

}  // namespace kvasir::worker
