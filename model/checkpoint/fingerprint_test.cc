#include "model/checkpoint/fingerprint.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_matchers.h"
#include "base/temp_folder.h"
#include "model/checkpoint/checkpoint.h"

namespace kvasir::model {
namespace {

// The test tensor has three by three tiles. Those in the last row have fewer
// rows, and those in the last column have fewer bytes per row.
constexpr int64_t kRows = 2 * kTileRows + 77;
constexpr int64_t kColumns = (2 * kTileRowBytes + 300) / 2;
constexpr int64_t kRowBytes = kColumns * 2;

TensorInfo Info() {
  TensorInfo info;
  info.name = "t";
  info.type = TensorType::kBF16;
  info.shape = {kRows, kColumns};
  info.size_bytes = kRows * kRowBytes;
  return info;
}

std::vector<std::byte> Bytes() {
  std::vector<std::byte> bytes(kRows * kRowBytes);
  uint32_t state = 1;
  for (std::byte& byte : bytes) {
    state = state * 1664525 + 1013904223;
    byte = static_cast<std::byte>(state >> 24);
  }
  return bytes;
}

// Returns the tiles of bytes [begin, end) of rows [first_row, end_row).
Tiles TilesOf(const std::vector<std::byte>& bytes, int64_t first_row,
              int64_t end_row, int64_t begin = 0, int64_t end = kRowBytes) {
  TileHasher hasher(static_cast<uint64_t>(end - begin));
  for (int64_t row = first_row; row < end_row; ++row) {
    hasher.Add(
        std::span(bytes).subspan(static_cast<size_t>(row * kRowBytes + begin),
                                 static_cast<size_t>(end - begin)));
  }
  return hasher.tiles();
}

std::string IdOf(const Tiles& tiles) {
  WeightsIdBuilder builder;
  builder.Add("t", Info(), tiles);
  return builder.Finish(DecoderSpec());
}

TEST(TileHasherTest, TileHashesDoNotDependOnTheSizeOfTheBlocksThatAreRead) {
  const std::vector<std::byte> bytes = Bytes();
  const Tiles whole = TilesOf(bytes, 0, kRows);
  EXPECT_EQ(whole.rows, 3);
  EXPECT_EQ(whole.columns, 3);
  for (const int64_t rows :
       {int64_t{1}, int64_t{100}, kTileRows, kTileRows + 1, kRows}) {
    TileHasher hasher(kRowBytes);
    std::span<const std::byte> rest = bytes;
    while (!rest.empty()) {
      const size_t size =
          std::min(rest.size(), static_cast<size_t>(rows * kRowBytes));
      hasher.Add(rest.first(size));
      rest = rest.subspan(size);
    }
    EXPECT_EQ(hasher.tiles(), whole) << rows;
  }
}

TEST(TileHasherTest, AChangedByteChangesOnlyTheHashOfItsTile) {
  std::vector<std::byte> bytes = Bytes();
  const Tiles before = TilesOf(bytes, 0, kRows);
  struct Place {
    int64_t row;
    int64_t byte;
    size_t tile;
  };
  for (const Place& place :
       {Place{0, 0, 0}, Place{kTileRows - 1, kTileRowBytes - 1, 0},
        Place{kTileRows - 1, kTileRowBytes, 1},
        Place{kTileRows, kTileRowBytes - 1, 3},
        Place{kRows - 1, kRowBytes - 1, 8}}) {
    std::byte& byte =
        bytes[static_cast<size_t>(place.row * kRowBytes + place.byte)];
    byte ^= std::byte{1};
    const Tiles after = TilesOf(bytes, 0, kRows);
    for (size_t tile = 0; tile < before.hashes.size(); ++tile) {
      EXPECT_EQ(after.hashes[tile] == before.hashes[tile], tile != place.tile)
          << tile << " of " << place.row << " " << place.byte;
    }
    EXPECT_NE(IdOf(after), IdOf(before));
    byte ^= std::byte{1};
  }
}

TEST(WeightsIdTest, TilesReadByDifferentRanksGiveTheSameIdAsTheWholeTensor) {
  const std::vector<std::byte> bytes = Bytes();
  const std::string whole = IdOf(TilesOf(bytes, 0, kRows));
  WeightsIdBuilder by_rows;
  by_rows.Add("t", Info(), TilesOf(bytes, kTileRows, kRows), 1);
  by_rows.Add("t", Info(), TilesOf(bytes, 0, kTileRows), 0);
  EXPECT_EQ(by_rows.Finish(DecoderSpec()), whole);
  // The two parts overlap: both contain the column of tiles in the middle.
  WeightsIdBuilder by_columns;
  by_columns.Add("t", Info(), TilesOf(bytes, 0, kRows, 0, 2 * kTileRowBytes));
  by_columns.Add("t", Info(),
                 TilesOf(bytes, 0, kRows, kTileRowBytes, kRowBytes), 0, 1);
  EXPECT_EQ(by_columns.Finish(DecoderSpec()), whole);
}

TEST(WeightsIdTest, TheIdDependsOnTheNameAndTheTypeOfATensor) {
  const Tiles tiles = TilesOf(Bytes(), 0, kRows);
  const std::string id = IdOf(tiles);
  WeightsIdBuilder other_name;
  other_name.Add("u", Info(), tiles);
  EXPECT_NE(other_name.Finish(DecoderSpec()), id);
  TensorInfo info = Info();
  info.type = TensorType::kF16;
  WeightsIdBuilder other_type;
  other_type.Add("t", info, tiles);
  EXPECT_NE(other_type.Finish(DecoderSpec()), id);
}

TEST(WeightsIdDeathTest, FinishAbortsIfATileIsMissing) {
  const std::vector<std::byte> bytes = Bytes();
  WeightsIdBuilder builder;
  builder.Add("t", Info(), TilesOf(bytes, 0, kTileRows));
  EXPECT_DEATH(builder.Finish(DecoderSpec()), "known");
  std::vector<std::byte> other = bytes;
  other[0] ^= std::byte{1};
  EXPECT_DEATH(builder.Add("t", Info(), TilesOf(other, 0, kTileRows)), "known");
}

struct Stored {
  const TensorInfo* info;
  std::vector<std::byte> bytes;
};

void WriteSafetensors(const std::string& path,
                      const std::vector<Stored>& tensors) {
  std::vector<std::string> fields;
  size_t end = 0;
  for (const Stored& tensor : tensors) {
    const size_t begin = end;
    end += tensor.bytes.size();
    fields.push_back(
        absl::StrCat("\"", tensor.info->name, "\":{\"dtype\":\"",
                     std::string(TensorTypeName(tensor.info->type)),
                     "\",\"shape\":[", absl::StrJoin(tensor.info->shape, ","),
                     "],\"data_offsets\":[", begin, ",", end, "]}"));
  }
  const std::string header = absl::StrCat("{", absl::StrJoin(fields, ","), "}");
  const uint64_t size = header.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof(size));
  file << header;
  for (const Stored& tensor : tensors) {
    file.write(reinterpret_cast<const char*>(tensor.bytes.data()),
               static_cast<std::streamsize>(tensor.bytes.size()));
  }
}

std::string IdOfFolder(const std::string& folder) {
  const auto checkpoint = Checkpoint::Open(folder);
  if (!checkpoint.ok()) return checkpoint.status().ToString();
  WeightsIdBuilder builder;
  std::vector<std::byte> buffer(1 << 16);
  for (const auto& [name, entry] : checkpoint->tensors().entries()) {
    TensorStream stream(entry, buffer);
    for (auto block = stream.Next(); block.ok() && block->num_rows > 0;) {
      block = stream.Next();
    }
    builder.Add(name, stream.info(), stream.tiles());
  }
  return builder.Finish(checkpoint->spec());
}

TEST(WeightsIdTest, ShardedAndSingleFileCheckpointsHaveTheSameId) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  const std::string single = absl::StrCat(source == nullptr ? "." : source,
                                          "/tests/golden/models/llama-mha");
  const base::TempFolder folder;
  std::filesystem::copy(single + "/config.json", folder.path());
  KVASIR_ASSERT_OK_AND_ASSIGN(const TensorStore store,
                              TensorStore::Open(single));
  std::vector<Stored> shards[2];
  std::vector<std::string> map;
  size_t next = 0;
  for (const auto& [name, entry] : store.entries()) {
    std::vector<std::byte> bytes(entry.info->size_bytes);
    KVASIR_ASSERT_OK(entry.file->Read(*entry.info, 0, bytes));
    map.push_back(
        absl::StrCat("\"", name, "\":\"", next % 2, ".safetensors\""));
    shards[next++ % 2].push_back({entry.info, std::move(bytes)});
  }
  WriteSafetensors(folder.File("0.safetensors"), shards[0]);
  WriteSafetensors(folder.File("1.safetensors"), shards[1]);
  folder.Write(
      "model.safetensors.index.json",
      absl::StrCat("{\"weight_map\":{", absl::StrJoin(map, ","), "}}"));
  EXPECT_EQ(IdOfFolder(folder.path()), IdOfFolder(single));
  EXPECT_EQ(IdOfFolder(folder.path()).size(), 32u);
}

}  // namespace
}  // namespace kvasir::model
