// Memory that is needed soon, asked for a line at a time. C++17.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvasir::kernels {

// Whether lines that are asked for come into the first level. An Intel core
// waits for few lines of that level at a time, and those that are asked for
// would keep out those that are read meanwhile. On a Zen 5 it is the faster way
// where data come from memory (measured; in cache it costs 1 to 2 %).
#if defined(__GNUC__) && defined(__x86_64__)
inline const bool kAsksForFirstLevel = [] {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd") != 0;
}();
#else
inline constexpr bool kAsksForFirstLevel = false;
#endif

// Asks for the line at an address: as far as the second level at least. Callers
// that do nothing else are to be inlined, too: g++ takes a function that only
// asks for one without effect, and leaves its calls out.
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

// Pieces of memory in the order in which they are read. Who reads and computes
// asks meanwhile for lines that lie up to kLead further on: best one now and
// then, for many at once make the core wait for them, as if they were read
// already.
// Advice only: what does not fit is forgotten.
// Threads: one.
class AheadLines {
 public:
  static constexpr int64_t kLineBytes = 64;
  // Enough for the latency of memory, little enough for the first level of
  // cache (half as many cost 4 to 12 % of decoding over dense caches).
  static constexpr int64_t kLead = 256;

  // Behind what was added before; neighbours in memory count as one piece.
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

  // What was added before the last call has been read; of it, what nobody has
  // asked for is passed over. What was added since is read next. As much as was
  // added at first may be asked for at once, up to kLead.
  void NextBlock() {
    read_ = block_end_;
    block_end_ = lines_;
    if (read_ == 0) allowed_ = std::min(lines_, kLead);
    while (asked_ < read_ && FindPiece()) Pass(read_ - asked_);
    allowed_ = std::max(allowed_, asked_);
  }
  // So many bytes are read next, and about as many asked for meanwhile: pieces
  // that were added late do not come all at once. What should have been asked
  // for by now is.
  void Read(int64_t bytes) {
    AskFor(allowed_ - asked_);
    const int64_t lines = LinesOf(bytes);
    read_ = std::min(read_ + lines, block_end_);
    allowed_ = std::max(allowed_, std::min({allowed_ + lines + (lines + 7) / 8,
                                            read_ + kLead, lines_}));
  }

  // Asks for the next lines, as far as they are not too far ahead.
  void Ask(int64_t lines = 1) { AskFor(std::min(lines, allowed_ - asked_)); }
  // Leaves it to the caller to ask for the next `bytes`, which lie behind the
  // address. Null: they are too far ahead, or not in one place.
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
  // Whether any line is left.
  bool FindPiece() {
    if (next_ < end_) return true;
    if (taken_ == added_) return false;
    next_ = pieces_[taken_ % kMostPieces].begin;
    end_ = pieces_[taken_++ % kMostPieces].end;
    return true;
  }
  // As many lines as the piece has, at most; returns how many.
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
  // Counted in lines from the first one on.
  int64_t asked_ = 0;
  int64_t allowed_ = 0;
  int64_t read_ = 0;
  int64_t block_end_ = 0;
  int64_t lines_ = 0;  // added
  uint32_t taken_ = 0;
  uint32_t added_ = 0;
  Piece pieces_[kMostPieces];
};

}  // namespace kvasir::kernels
