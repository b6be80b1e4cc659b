// Decides which boundaries get a tail. A boundary is a number of tokens that
// fills whole pages. Its tail is a copy of the sequence's side pages, taken
// when exactly these tokens were committed. A later sequence needs it, in
// addition to the token pages, to continue from there.
//
//   prompt:  |  found  |        to compute        |   output
//                      ^ fork point  ^ last boundary  ^ ^ ^ newest only
//
// All functions are pure.
#pragma once

#include <cstdint>

namespace kvasir::cache {

// The result of looking up a starting sequence in the prefix index.
struct TailLookup {
  int64_t page_tokens = 0;
  // tokens of the prompt, including those emitted before a preemption
  int64_t num_tokens = 0;
  // paged_tokens: the tokens in whole pages that the index has. found_tokens:
  // the tokens up to the last boundary with a tail, from which the sequence
  // continues.
  int64_t paged_tokens = 0;
  int64_t found_tokens = 0;
};

enum class TailKind {
  kNone,
  kStays,  // the tail stays until it is the oldest one and room is needed
  // the sequence's next tail replaces it, unless a prompt has found it
  kGivesWay,
};

class TailPolicy {
 public:
  TailPolicy() = default;  // this policy wants no tails
  explicit TailPolicy(const TailLookup& lookup);

  // The boundary at which a step of the prompt should end if it reaches that
  // far; 0: none. There is only one, so that it costs at most one additional
  // step. It is the fork point: the last boundary for which the index has the
  // token pages but no tail. If there is no fork point, it is the last boundary
  // of the prompt.
  int64_t cut_tokens() const { return cut_tokens_; }

  // The kind of tail that is published when a step ends with `tokens` committed
  // tokens.
  TailKind At(int64_t tokens) const;

 private:
  int64_t page_tokens_ = 0;  // 0: no tails
  int64_t num_tokens_ = 0;
  int64_t cut_tokens_ = 0;
};

// Returns how many pages of a group tails may take: a quarter of the pool, but
// at least the pages of one tail.
int64_t MaxTailPages(int64_t num_pages, int64_t pages_per_tail);

}  // namespace kvasir::cache
