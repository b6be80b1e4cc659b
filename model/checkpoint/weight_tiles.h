// Serializes tile hashes (fingerprint.h) so that ranks can exchange them. Each
// rank hashes the tiles of the weights that it reads. The weights_id follows
// from the hashes of all ranks.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "model/checkpoint/fingerprint.h"
#include "model/shapes/decoder_spec.h"

namespace kvasir::model {

// Returns a serialized kvasir.v1.WeightTiles: the name of each tensor, and
// about 16 bytes for each 128 KiB that were read. `tensors` must contain all
// tensors of the checkpoint, also those from which this rank has read nothing.
std::string WeightTilesText(const TilesByName& tensors,
                            const DecoderSpec& spec);
// Returns the serialized message for weights that are generated, not read. It
// contains only their id.
std::string WeightTilesText(std::string_view id);

// Returns the weights_id. `ranks` has the WeightTilesText of each rank, in rank
// order. The texts are not trusted: they are checked, and memory grows only
// with their length. The id does not depend on which rank has read what.
//   INVALID_ARGUMENT     a text is malformed
//   FAILED_PRECONDITION  ranks have tensors of different names or shapes, or a
//                        tile differs between two ranks, or no rank has it; the
//                        error names the tensor and the rank
absl::StatusOr<std::string> CombineWeightTiles(
    absl::Span<const std::string> ranks);

}  // namespace kvasir::model
