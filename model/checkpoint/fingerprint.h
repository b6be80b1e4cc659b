// Names a checkpoint's weights by their bytes: fixed tiles of each tensor are
// hashed apart and put together, so that the name depends neither on files nor
// on blocks nor on who has read which tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/checkpoint/safetensors.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// 128 bits that change when any bit of the data does. Fast, not secret.
struct Fingerprint {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};
std::string FingerprintText(const Fingerprint& fingerprint);

// A tile is so many rows by so many bytes of each; less at a tensor's ends. A
// rank that reads rows or columns of a tensor reads whole tiles of it, but for
// those at its borders.
inline constexpr int64_t kTileRows = 128;
inline constexpr int64_t kTileRowBytes = 1024;

struct Tiles {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<Fingerprint> hashes;  // [rows, columns]
  friend bool operator==(const Tiles&, const Tiles&) = default;
};

// Hashes rows from front to back, of a whole tensor or of a part that begins at
// a tile's corner.
// Threads: one at a time.
class TileHasher {
 public:
  explicit TileHasher(uint64_t row_bytes);
  ~TileHasher();

  // Whole rows: a multiple of row_bytes (CHECK).
  void Add(std::span<const std::byte> rows);
  // Of the rows so far; a last tile may be short.
  Tiles tiles() const;

 private:
  struct State;
  void CloseTiles(std::vector<Fingerprint>* out) const;

  const int64_t row_bytes_;
  std::vector<std::unique_ptr<State>> columns_;
  int64_t rows_in_tile_ = 0;
  std::vector<Fingerprint> done_;
};

// Of one tensor of a checkpoint: which of its tiles are known.
struct TensorTiles {
  // No tile known.
  static TensorTiles Of(const TensorInfo& info);

  std::string type_and_shape;
  int64_t rows = 0;  // of tiles
  int64_t columns = 0;
  std::vector<Fingerprint> hashes;  // [rows, columns]
  std::vector<bool> known;          // the same
};
// By name, as Checkpoint::Tensor finds it.
using TilesByName = std::map<std::string, TensorTiles, std::less<>>;

// The part of a spec that changes the outputs.
std::string OutputsText(const DecoderSpec& spec);
// Of tensors of which every tile is known, and OutputsText.
std::string WeightsIdOf(const TilesByName& tensors, std::string_view outputs);

// Gathers the tiles of a checkpoint's tensors into its weights_id. The order of
// the calls does not matter. Threads: one.
class WeightsIdBuilder {
 public:
  // That there is this tensor, even if none of its tiles is ever added.
  void AddTensor(std::string_view name, const TensorInfo& info);
  // The first of the tiles is at this place of the tensor's. CHECKs that they
  // lie inside it, and that a tile that comes twice is the same.
  void Add(std::string_view name, const TensorInfo& info, const Tiles& tiles,
           int64_t first_row = 0, int64_t first_column = 0);
  const TilesByName& tensors() const { return tensors_; }
  // Also depends on the fields of the spec that change the outputs. CHECKs that
  // no tile of a tensor is missing.
  std::string Finish(const DecoderSpec& spec) const;

 private:
  TensorTiles& Find(std::string_view name, const TensorInfo& info);

  TilesByName tensors_;
};

}  // namespace kvasir::model
