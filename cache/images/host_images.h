// Moves the cache pages of sequences between the device pools and the host
// pool.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cache/images/sequence_image.h"
#include "cache/pages/kv_cache_config.h"
#include "cache/pages/kv_cache_stats.h"
#include "cache/pages/page_copies.h"
#include "cache/prefix/prefix_cache.h"
#include "cache/tables/sequence_state.h"
#include "cache/tables/sequence_tables.h"

namespace kvasir::cache {

// Implements the operations on images that kv_cache.h documents. The caller
// owns the state of the sequences and passes it as a parameter. `cache`,
// `copies` and `counts` must outlive this object.
// Owns: the host pools.
// Threads: used only by the scheduler thread.
// Errors: if a pool has too few free pages, the result is an empty optional or
// a ReserveResult that is not ok. Misuse is a CHECK.
class HostImages {
 public:
  HostImages(const KvCacheConfig& config, PrefixCache* cache,
             PageCopies* copies, KvCacheStats* counts);

  ImageShape ShapeOf(const SequenceState& sequence) const;
  int64_t Bytes(const ImageShape& shape) const;
  // Allocates host pages and lists the copies of the sequence's pages into
  // them. Returns nothing and changes nothing if too few host pages are free.
  std::optional<SequenceImage> Export(const SequenceState& sequence,
                                      const TailPolicy& tails);
  // Returns whether the device pools have room for an Import. `found` are the
  // nodes of the prefix index for the image's full pages. `num_tokens` is the
  // number of the image's tokens plus the tokens that the sequence will run
  // after them.
  ReserveResult CheckRoom(const SequenceImage& image,
                          const std::vector<PrefixNodeId>& found,
                          size_t num_tokens, const StartOptions& options) const;
  // Fills a new sequence: shares the pages of `found`, allocates the others and
  // lists copies into them. Call it only if CheckRoom has found room.
  void Import(const SequenceImage& image,
              const std::vector<PrefixNodeId>& found, SequenceState* out);
  absl::StatusOr<SequenceImage> TakePages(const ImageShape& shape,
                                          const StartOptions& options);

  const PagePool& host_pool(size_t group) const { return *host_pools_[group]; }
  // Fills in the fields of `stats` that describe the host pool.
  void AddStats(size_t group, PageGroupStats* stats) const;

 private:
  bool AllocateHostPages(SequenceImage* image);
  void ImportPages(size_t group, const SequenceImage& image,
                   const std::vector<PrefixNodeId>& found, GroupState* out);
  absl::Status CheckShape(const ImageShape& shape,
                          const StartOptions& options) const;

  const KvCacheConfig& config_;
  PrefixCache& cache_;
  PageCopies& copies_;
  KvCacheStats& counts_;
  std::vector<std::unique_ptr<PagePool>> host_pools_;  // indexed by PageGroupId
};

}  // namespace kvasir::cache
