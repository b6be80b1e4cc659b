#include "kernels/latents/code_pack.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

namespace kvasir::kernels {
namespace {

struct Group {
  explicit Group(const std::vector<std::pair<int64_t, int>>& widths_and_bits) {
    for (const auto& [width, bits] : widths_and_bits) {
      runs.push_back({view.width, width, bits});
      view.width += width;
    }
    view.runs = runs.data();
    view.num_runs = static_cast<int64_t>(runs.size());
  }
  size_t bytes() const {
    return static_cast<size_t>(CodesBytes(LatentPart(), view));
  }
  std::vector<CodeRun> runs;
  LatentGroup view;
};

std::vector<Group> Groups() {
  std::vector<Group> groups;
  for (const int bits : {1, 2, 3, 4, 5, 6, 8}) {
    for (const int64_t width : {1, 7, 8, 24, 96, 160, 300}) {
      groups.emplace_back(Group({{width, bits}}));
    }
  }
  groups.emplace_back(Group({{6, 8}, {6, 4}, {6, 4}, {6, 3}, {6, 2}, {6, 1}}));
  groups.emplace_back(Group({{3, 1}, {5, 3}, {7, 2}, {1, 8}, {9, 4}, {11, 3}}));
  groups.emplace_back(Group({{8, 6}, {16, 5}, {8, 4}, {24, 3}, {8, 2}}));
  groups.emplace_back(Group({{9, 5}, {3, 2}, {7, 6}, {5, 1}, {11, 3}, {4, 0}}));
  groups.emplace_back(Group({{129, 3}, {77, 4}, {19, 1}, {41, 3}, {53, 2}}));
  return groups;
}

std::vector<uint8_t> RandomCodes(const Group& group) {
  std::mt19937 engine(static_cast<uint32_t>(group.view.width));
  std::vector<uint8_t> codes;
  for (const CodeRun& run : group.runs) {
    for (int64_t i = 0; i < run.width; ++i) {
      codes.push_back(static_cast<uint8_t>(engine() % (1u << run.bits)));
    }
  }
  return codes;
}

TEST(CodePackTest, ASlotHoldsItsBitPlanesOneAfterAnotherFromTheLowestBit) {
  for (const Group& group : Groups()) {
    const std::vector<uint8_t> codes = RandomCodes(group);
    std::vector<bool> stream;
    // For each key b of `first`, appends bits first[b] to first[b] + count - 1
    // of all codes of b bits to the expected stream.
    const auto append = [&](const std::map<int, int>& first, int count) {
      for (const CodeRun& run : group.runs) {
        const auto from = first.find(run.bits);
        if (from == first.end()) continue;
        for (int64_t c = run.begin; c < run.begin + run.width; ++c) {
          for (int bit = from->second; bit < from->second + count; ++bit) {
            stream.push_back((codes[static_cast<size_t>(c)] >> bit) & 1);
          }
        }
      }
    };
    append({{8, 0}}, 8);
    append({{4, 0}, {5, 0}, {6, 0}}, 4);
    append({{2, 0}, {3, 0}, {6, 4}}, 2);
    append({{1, 0}, {3, 2}, {5, 4}}, 1);
    std::vector<uint8_t> expected((stream.size() + 7) / 8);
    for (size_t bit = 0; bit < stream.size(); ++bit) {
      expected[bit / 8] =
          static_cast<uint8_t>(expected[bit / 8] | stream[bit] << (bit % 8));
    }
    std::vector<uint8_t> packed(group.bytes(), 0x5a);
    PackCodes(group.view, codes.data(), packed.data());
    EXPECT_EQ(expected, packed);
    std::vector<uint8_t> unpacked(codes.size(), 0xff);
    UnpackCodes(group.view, packed.data(), unpacked.data());
    EXPECT_EQ(codes, unpacked);
  }
}

TEST(CodePackTest, PackingCodesInPiecesGivesTheSameBytesAsPackingAllAtOnce) {
  for (const Group& group : Groups()) {
    const std::vector<uint8_t> codes = RandomCodes(group);
    std::vector<uint8_t> expected(group.bytes());
    PackCodes(group.view, codes.data(), expected.data());
    for (const int64_t at_once : {300, 40, 8}) {
      // The 8 bytes after the slot must not change.
      std::vector<uint8_t> packed(group.bytes() + 8, 0);
      std::fill(packed.end() - 8, packed.end(), uint8_t{0x5a});
      CodeCursor cursor(group.view);
      for (const CodeRun& run : group.runs) {
        const CodePlace place = cursor.Next(run);
        for (int64_t i = 0; i < run.width; i += at_once) {
          WriteCodes(packed.data(), place, i, codes.data() + run.begin + i,
                     std::min(at_once, run.width - i));
        }
      }
      EXPECT_EQ(std::vector<uint8_t>(8, 0x5a),
                std::vector<uint8_t>(packed.end() - 8, packed.end()));
      packed.resize(group.bytes());
      EXPECT_EQ(expected, packed);
    }
  }
}

TEST(CodePackTest, ACodeOfThreeBitsTakesThreeBits) {
  EXPECT_EQ(36u, Group({{96, 3}}).bytes());
  EXPECT_EQ(3u, Group({{7, 3}}).bytes());
  EXPECT_EQ(1u, Group({{1, 1}}).bytes());
}

}  // namespace
}  // namespace kvasir::kernels
