#include "kernels/simd/ahead_lines.h"

#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace kvasir::kernels {
namespace {

constexpr int64_t kLine = AheadLines::kLineBytes;
constexpr int64_t kLead = AheadLines::kLead;

class AheadLinesTest : public ::testing::Test {
 protected:
  const char* At(int64_t line) const { return memory_.data() + line * kLine; }
  // Takes the next line that may be prefetched and returns its index in
  // memory_; -1 if there is none.
  int64_t TakeLine() {
    const char* line = lines_.Take(kLine);
    return line == nullptr ? -1 : (line - memory_.data()) / kLine;
  }
  int64_t CountRest() {
    int64_t count = 0;
    while (TakeLine() >= 0) ++count;
    return count;
  }

  std::vector<char> memory_ = std::vector<char>(8 * kLead * kLine);
  AheadLines lines_;
};

TEST_F(AheadLinesTest, PrefetchesLinesInTheOrderInWhichTheyWereAdded) {
  lines_.Add(At(40), 2 * kLine);
  lines_.Add(At(7), kLine);
  lines_.Add(At(100), 1);
  lines_.NextBlock();
  for (const int64_t line : {40, 41, 7, 100, -1}) EXPECT_EQ(TakeLine(), line);
}

TEST_F(AheadLinesTest, PrefetchesOnlyALimitedNumberOfLinesAheadOfTheReads) {
  lines_.Add(At(0), 2 * kLead * kLine);
  lines_.NextBlock();
  EXPECT_EQ(CountRest(), kLead);
  lines_.Read(3 * kLine);
  EXPECT_EQ(TakeLine(), kLead);
  EXPECT_EQ(CountRest(), 2);
  // The reader reads more lines than were added, but only the added
  // lines count.
  lines_.Read(9 * kLead * kLine);
  EXPECT_EQ(CountRest(), kLead - 3);
}

TEST_F(AheadLinesTest,
       LinesThatWereNotPrefetchedInTimeArePrefetchedByTheNextRead) {
  lines_.Add(At(0), 3 * kLead * kLine);
  lines_.NextBlock();
  lines_.Read(10 * kLine);  // prefetches the first kLead lines
  EXPECT_EQ(TakeLine(), kLead);
  lines_.Read(20 * kLine);  // prefetches the lines up to kLead + 10
  EXPECT_EQ(TakeLine(), kLead + 10);
}

TEST_F(AheadLinesTest,
       LinesThatWereAddedLateArePrefetchedOnlyAsReadingContinues) {
  lines_.Add(At(0), kLead / 2 * kLine);
  lines_.NextBlock();
  EXPECT_EQ(CountRest(), kLead / 2);
  lines_.Add(At(kLead), 4 * kLead * kLine);
  EXPECT_EQ(TakeLine(), -1);
  lines_.Read(40 * kLine);
  EXPECT_EQ(TakeLine(), kLead);
  EXPECT_EQ(CountRest(), 40 + 40 / 8 - 1);
}

TEST_F(AheadLinesTest, AskPassesLinesAcrossPiecesButNotBeyondTheAllowedOnes) {
  lines_.Add(At(10), 4 * kLine + 1);  // 5 lines
  lines_.Add(At(50), 2 * kLead * kLine);
  lines_.NextBlock();
  lines_.Ask(2);
  EXPECT_EQ(TakeLine(), 12);
  lines_.Ask(4);  // the last 2 lines of the first piece and 2 of the second
  EXPECT_EQ(TakeLine(), 52);
  lines_.Ask(kLead);  // only the rest of kLead lines is allowed
  EXPECT_EQ(TakeLine(), -1);
  lines_.Read(3 * kLine);
  EXPECT_EQ(TakeLine(), 50 + kLead - 5);
}

TEST_F(AheadLinesTest, LinesOfEarlierBlocksAreNotPrefetchedAnyMore) {
  lines_.Add(At(0), 2 * kLead * kLine);
  lines_.NextBlock();
  lines_.Add(At(3 * kLead), kLead * kLine);
  lines_.NextBlock();
  lines_.Read(kLine);
  EXPECT_EQ(TakeLine(), 3 * kLead);
}

TEST_F(AheadLinesTest, ALineThatSeveralPiecesShareIsPrefetchedOnce) {
  // Adds three adjacent pieces in the same line, and then a piece in another
  // line.
  for (int i = 0; i < 3; ++i) lines_.Add(At(5) + i * 20, 20);
  lines_.Add(At(9), 20);
  lines_.NextBlock();
  for (const int64_t line : {5, 9, -1}) EXPECT_EQ(TakeLine(), line);
}

TEST_F(AheadLinesTest, TakeReturnsOnlyContiguousBytesThatMayBePrefetched) {
  lines_.Add(At(3), 2 * kLine);
  lines_.Add(At(20), (kLead + 2) * kLine);
  lines_.NextBlock();
  EXPECT_EQ(lines_.Take(3 * kLine), nullptr);
  EXPECT_EQ(lines_.Take(2 * kLine), At(3));
  EXPECT_EQ(lines_.Take(2 * kLine), At(20));
  EXPECT_EQ(TakeLine(), 22);
  // Five lines were taken above, so this call would exceed kLead by one line.
  EXPECT_EQ(lines_.Take((kLead - 4) * kLine), nullptr);
  EXPECT_EQ(lines_.Take((kLead - 5) * kLine), At(23));
}

TEST_F(AheadLinesTest, DropsPiecesThatDoNotFitIntoTheQueue) {
  const auto count = static_cast<int64_t>(memory_.size()) / kLine / 2;
  ASSERT_GT(count, 3 * kLead);
  // Adds every second line as a piece, so that no pieces are joined.
  for (int64_t i = 0; i < count; ++i) lines_.Add(At(2 * i), kLine);
  lines_.NextBlock();
  EXPECT_EQ(TakeLine(), 0);
  lines_.Read(count * kLine);
  EXPECT_EQ(TakeLine(), -1);
  // The queue has room again.
  lines_.Add(At(1), kLine);
  lines_.NextBlock();
  lines_.Read(kLine);
  EXPECT_EQ(TakeLine(), 1);
}

TEST_F(AheadLinesTest, EmptyQueuesAndEmptyPiecesPrefetchNothing) {
  lines_.NextBlock();
  lines_.Ask();
  lines_.Read(kLine);
  EXPECT_EQ(TakeLine(), -1);
  lines_.Add(At(3), kLine);
  lines_.Add(At(9), 0);
  lines_.Add(At(12), -kLine);
  lines_.Add(At(20), kLine);
  lines_.NextBlock();
  for (const int64_t line : {3, 20, -1}) EXPECT_EQ(TakeLine(), line);
}

TEST_F(AheadLinesTest, ANewPieceIsNotJoinedWithAPartlyPrefetchedNeighbour) {
  lines_.Add(At(0), 2 * kLine);
  lines_.NextBlock();
  EXPECT_EQ(TakeLine(), 0);
  lines_.Add(At(2), 2 * kLine);
  lines_.NextBlock();
  lines_.Read(2 * kLine);
  for (const int64_t line : {2, 3, -1}) EXPECT_EQ(TakeLine(), line);
}

// Pieces have 33 lines, and the reader takes 8 lines at a time. Take must
// return null if the next 8 lines are not in a single piece, but must succeed
// otherwise.
TEST_F(AheadLinesTest,
       MostTakesSucceedEvenIfPieceSizesAreNotMultiplesOfTheSizeTaken) {
  int64_t taken = 0;
  int64_t asked = 0;
  int64_t next = 0;
  const auto add = [&] {
    lines_.Add(At(next), 33 * kLine);
    next += 40;
  };
  for (int block = 0; block < 10; ++block) {
    for (int i = 0; i < 4; ++i) add();
    if (block == 0) lines_.NextBlock();
    for (int i = 0; block > 0 && i < 4; ++i) {
      lines_.Read(33 * kLine);
      for (int step = 0; step < 4; ++step) {
        if (lines_.Take(8 * kLine) != nullptr) {
          ++taken;
        } else {
          lines_.Ask(8);
          ++asked;
        }
      }
    }
    if (block > 0) lines_.NextBlock();
  }
  EXPECT_EQ(taken + asked, 9 * 16);
  EXPECT_GT(taken, 2 * asked);
}

}  // namespace
}  // namespace kvasir::kernels
