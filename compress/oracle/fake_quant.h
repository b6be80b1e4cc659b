// Imitates how the cache stores latents: returns the codes that the cache would
// hold, and the numbers that attention would read back. Follows the rules of
// docs/artifact.md in float32 IEEE arithmetic, so that the codes of an engine
// can be compared with these codes one by one.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// How one latent is coded, channel by channel.
struct LatentCodec {
  // Stored channels [begin, begin + width). They have the same number of bits,
  // and in each token they share one minimum and scale.
  struct Run {
    int64_t begin = 0;
    int64_t width = 0;
    int bits = 0;
  };
  // The type in which latents are stored without codes; unspecified if codes
  // are stored (`runs`).
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  std::vector<Run> runs;
  // Type in which a token's minima and scales are stored.
  kvasir::v1::DataType param_dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  bool channel_static = false;
  // Levels to which normalized numbers are rounded. Empty if the codec does not
  // use such levels.
  std::vector<float> levels;
  // [R', R'] float32 for HADAMARD_ONLINE; otherwise undefined.
  at::Tensor hadamard;
  int64_t stored_width = 0;  // R'
};

// Makes the codec of a plan's latent, with the same runs as in the cache's
// layout. Unimplemented for codecs that depend on a whole sequence
// (CHANNEL_SEQUENCE, BASIS_SEQUENCE).
absl::StatusOr<LatentCodec> MakeLatentCodec(const plan::ResolvedPart& part,
                                            const plan::ResolvedLatent& latent);
// Makes the codec of a latent with `rank` channels. `codec` must have been
// accepted by plan::ValidatePlan.
absl::StatusOr<LatentCodec> MakeLatentCodec(const kvasir::v1::Codec& codec,
                                            int64_t rank);

// The ranges of a latent's channels for CHANNEL_STATIC, float32 on the CPU.
struct StaticRange {
  at::Tensor minimum;  // [R']
  at::Tensor scale;    // [R']
};

struct CodedLatent {
  at::Tensor values;  // decoded, in the shape of the input [..., R']
  // uint8 [..., R'] on the CPU; undefined if the codec stores no codes. With
  // HADAMARD_ONLINE they are the codes of the product with the Hadamard matrix.
  at::Tensor codes;
  // The parameters that PER_TOKEN stores, float32 [..., runs] on the CPU.
  // PER_TOKEN_NORM has only the scale.
  at::Tensor minimum;
  at::Tensor scale;
  int64_t num_clamped = 0;  // numbers over half a step outside a StaticRange
};

struct CodeOptions {
  const StaticRange* range = nullptr;  // required for CHANNEL_STATIC codecs
  // true: the result has `codes`, `minimum` and `scale`, too
  bool keep_codes = false;
};

// Codes every row of `latent` [..., R'] and decodes it again. Gradients pass as
// if nothing were coded (straight through).
// Errors: InvalidArgument, naming the row and channel, for numbers that are not
//   finite or overflow the codec's types, and for channels that need a static
//   range and have none.
absl::StatusOr<CodedLatent> CodeLatent(const LatentCodec& codec,
                                       const at::Tensor& latent,
                                       const CodeOptions& options = {});

// Returns the greatest number of the type that is at most x (RoundDown), or the
// least that is at least x (RoundUp); infinite on overflow.
float RoundDown(float x, kvasir::v1::DataType dtype);
float RoundUp(float x, kvasir::v1::DataType dtype);

}  // namespace kvasir::compress
