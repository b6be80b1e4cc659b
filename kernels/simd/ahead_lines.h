// Prefetches memory that is needed soon, a line at a time. C++17.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvasir::kernels {

// True if prefetches go into the first-level cache. An Intel core can wait for
// only a few lines of that level at a time, and prefetches would delay the
// lines that are read meanwhile. On a Zen 5 it is faster for data in memory
// (measured; for data in cache it costs 1 to 2 %).
#if defined(__GNUC__) && defined(__x86_64__)
inline const bool kAsksForFirstLevel = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
}();
#else
inline constexpr bool kAsksForFirstLevel = false;
#endif

// Prefetches the line at an address at least into the second-level cache.
// Functions that only call this must be inlined, too: g++ regards a function
// that only prefetches as one without effect, and removes its calls.
#if defined(__GNUC__)
__attribute__((always_inline)) inline void AskForLine(const char* address) {
  if (kAsksForFirstLevel) {
    __builtin_prefetch(address, 0, 3);
  } else {
    __builtin_prefetch(address, 0, 2);
  }
}
#else
inline void AskForLine(const char*) {}
#endif

// A queue of pieces of memory in the order in which they will be read. While
// the reader computes, it prefetches lines up to kLead ahead: one line now and
// then, because the core would wait for many prefetches at once as it waits for
// reads. The queue only gives advice: pieces that do not fit are dropped.
// Threads: one.
class AheadLines {
 public:
  static constexpr int64_t kLineBytes = 64;
  // Long enough to hide the latency of memory and short enough for the
  // first-level cache. With half of it, decoding over dense caches is 4 to 12 %
  // slower.
  static constexpr int64_t kLead = 256;

  // Appends a piece; pieces that are neighbours in memory are joined.
  void Add(const char* begin, int64_t bytes) {
    if (bytes <= 0) return;
    Piece& last = pieces_[(added_ - 1) % kMostPieces];
    if (added_ != taken_ && last.end == begin) {
      lines_ -= LinesOf(last.end - last.begin);
      last.end += bytes;
      lines_ += LinesOf(last.end - last.begin);
    } else if (added_ - taken_ < kMostPieces) {
      pieces_[added_++ % kMostPieces] = {begin, begin + bytes};
      lines_ += LinesOf(bytes);
    }
  }

  // Begins the next block. The pieces that were added before the previous call
  // have been read; their lines that were not prefetched are skipped. The
  // pieces that were added since are read next. The first block may be
  // prefetched at once, up to kLead.
  void NextBlock() {
    read_ = block_end_;
    block_end_ = lines_;
    if (read_ == 0) allowed_ = std::min(lines_, kLead);
    while (asked_ < read_ && FindPiece()) Pass(read_ - asked_);
    allowed_ = std::max(allowed_, asked_);
  }
  // Announces that `bytes` are read next and allows about as many bytes of
  // prefetches, so that pieces that were added late are not prefetched all at
  // once. Prefetches lines that are overdue.
  void Read(int64_t bytes) {
    AskFor(allowed_ - asked_);
    const int64_t lines = LinesOf(bytes);
    read_ = std::min(read_ + lines, block_end_);
    allowed_ = std::max(allowed_, std::min({allowed_ + lines + (lines + 7) / 8,
                                            read_ + kLead, lines_}));
  }

  // Prefetches the next lines that are not too far ahead.
  void Ask(int64_t lines = 1) { AskFor(std::min(lines, allowed_ - asked_)); }
  // Returns the address of the next `bytes`, which the caller prefetches
  // itself; null if they are too far ahead or not contiguous.
  const char* Take(int64_t bytes) {
    const int64_t lines = LinesOf(bytes);
    if (lines > allowed_ - asked_ || !FindPiece() ||
        lines > LinesOf(end_ - next_)) {
      return nullptr;
    }
    const char* begin = next_;
    Pass(lines);
    return begin;
  }

 private:
  static constexpr uint32_t kMostPieces = 256;
  struct Piece {
    const char* begin;
    const char* end;
  };

  static int64_t LinesOf(int64_t bytes) {
    return (bytes + kLineBytes - 1) / kLineBytes;
  }
  // Makes the piece of the next line current. Returns false if no line is left.
  bool FindPiece() {
    if (next_ < end_) return true;
    if (taken_ == added_) return false;
    next_ = pieces_[taken_ % kMostPieces].begin;
    end_ = pieces_[taken_++ % kMostPieces].end;
    return true;
  }
  // Skips at most `lines` lines of the current piece. Returns how many.
  int64_t Pass(int64_t lines) {
    lines = std::min(lines, LinesOf(end_ - next_));
    next_ += lines * kLineBytes;
    asked_ += lines;
    return lines;
  }
  void AskFor(int64_t lines) {
    while (lines > 0 && FindPiece()) {
      const char* next = next_;
      const int64_t count = Pass(lines);
      for (int64_t i = 0; i < count; ++i, next += kLineBytes) AskForLine(next);
      lines -= count;
    }
  }

  const char* next_ = nullptr;
  const char* end_ = nullptr;
  // Positions in lines, counted from the first line.
  int64_t asked_ = 0;
  int64_t allowed_ = 0;
  int64_t read_ = 0;
  int64_t block_end_ = 0;
  int64_t lines_ = 0;  // lines that were added
  uint32_t taken_ = 0;
  uint32_t added_ = 0;
  Piece pieces_[kMostPieces];
};

}  // namespace kvasir::kernels
