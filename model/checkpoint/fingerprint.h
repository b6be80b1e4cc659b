// Identifies a checkpoint's weights by their bytes. Each tensor is cut into
// tiles of a fixed size, which are hashed separately and then combined. So the
// id depends neither on how the weights are divided into files, nor on which
// rank has read which tile.
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

// A 128-bit hash. It is fast, but it does not protect against
// deliberate forgery.
struct Fingerprint {
  uint64_t high = 0;
  uint64_t low = 0;
  friend bool operator==(const Fingerprint&, const Fingerprint&) = default;
};
std::string FingerprintText(const Fingerprint& fingerprint);

// The size of a tile: the number of its rows, and the bytes of each row.
// Tiles at the end of a tensor's rows or columns may be smaller. Tiles are
// so small that a rank that reads only a part of a tensor still reads
// mostly whole tiles.
inline constexpr int64_t kTileRows = 128;
inline constexpr int64_t kTileRowBytes = 1024;

struct Tiles {
  int64_t rows = 0;
  int64_t columns = 0;
  std::vector<Fingerprint> hashes;  // [rows, columns]
  friend bool operator==(const Tiles&, const Tiles&) = default;
};

// Hashes the rows of a tensor in order, or those of a rectangle whose first row
// and first column begin a tile.
// Threads: used by one thread at a time.
class TileHasher {
 public:
  explicit TileHasher(uint64_t row_bytes);
  ~TileHasher();

  // `rows` must be whole rows: a multiple of row_bytes (CHECK).
  void Add(std::span<const std::byte> rows);
  // The tiles of all rows that were added. The last tiles may have fewer rows.
  Tiles tiles() const;

 private:
  struct State;
  void CloseTiles(std::vector<Fingerprint>* out) const;

  const int64_t row_bytes_;
  std::vector<std::unique_ptr<State>> columns_;
  int64_t rows_in_tile_ = 0;
  std::vector<Fingerprint> done_;
};

// The hashes of one tensor's tiles. Some may be unknown, because they have not
// been read yet.
struct TensorTiles {
  // Returns the tiles of a tensor, none of them known yet.
  static TensorTiles Of(const TensorInfo& info);

  std::string type_and_shape;
  int64_t rows = 0;  // the number of rows and of columns of tiles
  int64_t columns = 0;
  std::vector<Fingerprint> hashes;  // [rows, columns]
  std::vector<bool> known;          // [rows, columns]
};
// The keys are the tensor names that Checkpoint::Tensor uses.
using TilesByName = std::map<std::string, TensorTiles, std::less<>>;

// Returns a text with the fields of `spec` that change the model's outputs.
std::string OutputsText(const DecoderSpec& spec);
// The weights_id: a hash of all tiles of `tensors` and of `outputs`, the result
// of OutputsText(). Every tile must be known.
std::string WeightsIdOf(const TilesByName& tensors, std::string_view outputs);

// Collects the tiles of a checkpoint's tensors and computes its weights_id. The
// order of the calls does not matter.
// Threads: used by one thread only.
class WeightsIdBuilder {
 public:
  // Registers the tensor, so that Finish fails if its tiles are never added.
  void AddTensor(std::string_view name, const TensorInfo& info);
  // Adds a rectangle of tiles. `first_row` and `first_column` are the place of
  // its first tile, counted in tiles. CHECKs that the tiles lie inside the
  // tensor, and that a tile that is added twice has the same hash.
  void Add(std::string_view name, const TensorInfo& info, const Tiles& tiles,
           int64_t first_row = 0, int64_t first_column = 0);
  const TilesByName& tensors() const { return tensors_; }
  // The id also depends on the fields of the spec that change the outputs.
  // CHECKs that no tile of any tensor is missing.
  std::string Finish(const DecoderSpec& spec) const;

 private:
  TensorTiles& Find(std::string_view name, const TensorInfo& info);

  TilesByName tensors_;
};

}  // namespace kvasir::model
