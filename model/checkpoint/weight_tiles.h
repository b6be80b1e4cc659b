// The tiles of weights as ranks tell each other of them, each of the part that
// it has read, and the weights_id that all parts together have.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/checkpoint/fingerprint.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// kvasir.v1.WeightTiles, about 16 bytes for each 128 KiB that were read, and a
// name for each tensor. `tensors` names all of the weights'.
std::string WeightTilesText(const TilesByName& tensors,
                            const DecoderSpec& spec);
// Of weights that are not read from anywhere: their id.
std::string WeightTilesText(std::string_view id);

// `ranks` has the text of each rank, in their order, none of which is believed
// before it is checked: memory grows with the texts alone. Of one rank that has
// read everything it is WeightsIdBuilder's id, and of ranks that have read it
// together the same.
//   INVALID_ARGUMENT for a text that is malformed; FAILED_PRECONDITION where
//   ranks have tensors of different names or shapes, where a tile is not the
//   same on two ranks, or is on none: with the tensor, and with the rank.
absl::StatusOr<std::string> CombineWeightTiles(
    absl::Span<const std::string> ranks);

}  // namespace kvasir::model
