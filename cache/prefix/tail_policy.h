// Which boundaries keep a tail. A boundary is a number of tokens that fills
// whole pages; its tail is a copy of the sequence's side pages, taken when
// exactly these tokens were committed: what a later sequence needs beside the
// pages of tokens to go on from there.
//
//   prompt:  |  found  |        to compute        |   output
//                      ^ fork point  ^ last boundary  ^ ^ ^ newest only
//
// Pure: the one place that decides.
#pragma once

#include <cstdint>

namespace kvasir::cache {

// What a start found of a sequence's tokens.
struct TailLookup {
  int64_t page_tokens = 0;  // P
  int64_t num_tokens = 0;   // of the prompt; what was emitted before included
  // What the index has in whole pages, and what of it a tail ends: found.
  int64_t paged_tokens = 0;
  int64_t found_tokens = 0;
};

enum class TailKind {
  kNone,
  kStays,     // until it is the oldest
  kGivesWay,  // to the same sequence's next one, unless another found it
};

class TailPolicy {
 public:
  TailPolicy() = default;  // no tails
  explicit TailPolicy(const TailLookup& lookup);

  // Where a step of the prompt should end, should it reach that far; 0: where
  // it likes. One boundary at most, so that it costs one step: the fork point,
  // where the text leaves one that the index has without a tail; else the last
  // boundary of the prompt.
  int64_t cut_tokens() const { return cut_tokens_; }

  // Of what is committed when a step ends at `tokens`.
  TailKind At(int64_t tokens) const;

 private:
  int64_t page_tokens_ = 0;  // 0: no tails
  int64_t num_tokens_ = 0;
  int64_t cut_tokens_ = 0;
};

// Pages that tails may take of a group's: a quarter, or one tail.
int64_t MaxTailPages(int64_t num_pages, int64_t pages_per_tail);

}  // namespace kvasir::cache
