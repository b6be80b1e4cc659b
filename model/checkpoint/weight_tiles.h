// Tile hashes in the form in which ranks exchange them. Each rank has hashed
// the tiles of the weights that it has read; the hashes of all ranks together
// give the weights_id.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/checkpoint/fingerprint.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// A serialized kvasir.v1.WeightTiles. It has the name of each tensor and about
// 16 bytes for each 128 KiB that were read. `tensors` must contain all tensors
// of the weights, also those of which this rank has read nothing.
std::string WeightTilesText(const TilesByName& tensors,
                            const DecoderSpec& spec);
// The serialized message for weights that are generated instead of read. It
// contains only their id.
std::string WeightTilesText(std::string_view id);

// `ranks` has the text of each rank, in rank order. The texts are checked
// before they are used, and memory grows only with their length. The result is
// the id of WeightsIdBuilder, whether one rank has read everything or several
// ranks have read it together.
//   INVALID_ARGUMENT     a text is malformed
//   FAILED_PRECONDITION  ranks have tensors of different names or shapes, or a
//                        tile differs between two ranks, or no rank has it; the
//                        error names the tensor and the rank
absl::StatusOr<std::string> CombineWeightTiles(
    absl::Span<const std::string> ranks);

}  // namespace kvasir::model
