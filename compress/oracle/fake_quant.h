// Codes and decodes latents: returns the numbers that come back out of the
// cache, and the codes in between. The rule is that of docs/artifact.md, in
// float32 IEEE arithmetic, so that an engine can be compared code by code.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "plan/resolved_plan.h"
#include "proto/kvasir/v1/kv_plan.pb.h"

namespace kvasir::compress {

// A codec, applied to the channels of one latent.
struct LatentCodec {
  // Stored channels [begin, begin + width) with the same bits. Per token they
  // share one minimum and scale.
  struct Run {
    int64_t begin = 0;
    int64_t width = 0;
    int bits = 0;
  };
  // Type of the numbers; unspecified if `runs` hold codes.
  kvasir::v1::DataType dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  std::vector<Run> runs;
  // Type of the stored minima and scales of a token.
  kvasir::v1::DataType param_dtype = kvasir::v1::DATA_TYPE_UNSPECIFIED;
  bool channel_static = false;
  std::vector<float> levels;  // of a token's normalized numbers; empty for
                              // other codecs
  // [R', R'] float32 for HADAMARD_ONLINE; otherwise undefined.
  at::Tensor hadamard;
  int64_t stored_width = 0;  // R'
};

// The channels of a run share one range, as in the cache's layout.
// Unimplemented for codecs that depend on a whole sequence (CHANNEL_SEQUENCE,
// BASIS_SEQUENCE).
absl::StatusOr<LatentCodec> MakeLatentCodec(const plan::ResolvedPart& part,
                                            const plan::ResolvedLatent& latent);
// The codec of `rank` channels; plan::ValidatePlan must have accepted it.
absl::StatusOr<LatentCodec> MakeLatentCodec(const kvasir::v1::Codec& codec,
                                            int64_t rank);

// Ranges of CHANNEL_STATIC, float32 on the CPU.
struct StaticRange {
  at::Tensor minimum;  // [R']
  at::Tensor scale;    // [R']
};

struct CodedLatent {
  at::Tensor values;  // decoded, in the shape of the input [..., R']
  // uint8 [..., R'] on the CPU; undefined for a dtype. With HADAMARD_ONLINE
  // they are the codes of the product with the matrix.
  at::Tensor codes;
  // Stored parameters of PER_TOKEN, float32 [..., runs] on the CPU.
  // PER_TOKEN_NORM has only the scale.
  at::Tensor minimum;
  at::Tensor scale;
  int64_t num_clamped = 0;  // codes outside a CHANNEL_STATIC range
};

struct CodeOptions {
  const StaticRange* range = nullptr;  // needed for CHANNEL_STATIC
  bool keep_codes = false;             // fill codes, minimum and scale
};

// Codes every row of `latent` [..., R'] and decodes it again. Gradients pass as
// if nothing were coded (straight through).
// Errors: InvalidArgument, naming the row and channel, for numbers that are not
//   finite or overflow the codec's types, and for channels without a static
//   range.
absl::StatusOr<CodedLatent> CodeLatent(const LatentCodec& codec,
                                       const at::Tensor& latent,
                                       const CodeOptions& options = {});

// The nearest number of a type that is at most (RoundDown) or at least
// (RoundUp) x; infinite on overflow.
float RoundDown(float x, kvasir::v1::DataType dtype);
float RoundUp(float x, kvasir::v1::DataType dtype);

}  // namespace kvasir::compress
