// Determines the part of a layer that a tensor-parallel rank holds. Layout,
// loader and executor all use these functions, so that they agree.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

namespace kvasir::plan {

struct TpShard {
  int64_t rank = 0;
  int64_t size = 1;

  friend bool operator==(const TpShard&, const TpShard&) = default;
};

// A half-open range of heads.
struct HeadRange {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  bool Contains(int64_t head) const { return first <= head && head < end(); }
  friend bool operator==(const HeadRange&, const HeadRange&) = default;
};

// The KV heads of one rank: each rank gets equally many consecutive heads. If
// there are more ranks than heads, each head is held by size / num_kv_heads
// neighbouring ranks. INVALID_ARGUMENT if neither number divides the other, or
// if `shard` is no valid rank; the error states the numbers.
inline absl::StatusOr<HeadRange> KvHeadsOfRank(TpShard shard,
                                               int64_t num_kv_heads) {
  if (shard.size < 1 || shard.rank < 0 || shard.rank >= shard.size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "tensor-parallel rank ", shard.rank, " is outside a group of size ",
        shard.size, ": ranks are counted from 0"));
  }
  if (num_kv_heads < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a layer must have at least 1 KV head, but has ", num_kv_heads));
  }
  if (num_kv_heads % shard.size == 0) {
    const int64_t count = num_kv_heads / shard.size;
    return HeadRange{shard.rank * count, count};
  }
  if (shard.size % num_kv_heads == 0) {
    return HeadRange{shard.rank / (shard.size / num_kv_heads), 1};
  }
  return absl::InvalidArgumentError(absl::StrCat(
      num_kv_heads, " KV heads cannot be divided among ", shard.size,
      " tensor-parallel ranks: one number must divide the other"));
}

// A range of token ids. A rank holds their rows of the output head and of
// the embedding.
struct IdRange {
  int64_t first = 0;
  int64_t count = 0;

  int64_t end() const { return first + count; }
  friend bool operator==(const IdRange&, const IdRange&) = default;
};

// Packed weights have panels of 32 columns, so each rank gets whole panels of
// the output head: this many token ids each.
inline constexpr int64_t kIdsPerPanel = 32;

// The token ids of one rank: consecutive whole panels, divided among the ranks
// as equally as possible. The last rank's last panel may be incomplete. With a
// small vocabulary some ranks get no ids.
inline IdRange IdsOfRank(TpShard shard, int64_t vocab_size) {
  const int64_t panels = (vocab_size + kIdsPerPanel - 1) / kIdsPerPanel;
  const auto first = [&](int64_t rank) {
    const int64_t id = panels * rank / shard.size * kIdsPerPanel;
    return id < vocab_size ? id : vocab_size;
  };
  return {first(shard.rank), first(shard.rank + 1) - first(shard.rank)};
}

}  // namespace kvasir::plan
