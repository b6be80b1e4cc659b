// Caches that no plan expresses, or that need none, as bars to be measured
// against: keys and values of the uncompressed model, quantized or cut. By
// name:
//
//   per-token:k4,v4          b bits per token and head, 16: whole bf16 numbers;
//                            one side may be left out (16)
//   kivi:2,group=32,residual=128
//                            keys per channel in blocks of `group` tokens,
//                            values per token in runs of `group` channels; the
//                            `residual` tokens nearest to the query exact (0:
//                            none)
//   per-channel:k3.pre       keys per channel in ranges of a calibration text,
//                            before (pre) or after (post) their rotation; ",v4"
//                            for values per token
//   think:0.5,4              per head and sequence, the share of key channels
//                            with the greatest |q| |k| over the window, 4 bits
//                            per token; ",v4" for values
//   low-rank:160/1024        keys before their rotation, of that share of the
//                            width, by the SVD of the window; numbers exact
//   rotated:k4,v4            TurboQuant's codes per token and head, as vLLM has
//                            them: rotated, one norm, Lloyd-Max levels
//   ggml:kq8_0,vq4_0         llama.cpp's, per head between a Hadamard matrix
//   and
//                            its inverse (rotation=off: plain)
//   fp8:e4m3                 each number on its own, or e5m2
//
// Every name may add what stays exact: sinks=4 (first tokens), window=128
// (tokens nearest to the query; kivi has its residual), skip=2 (first and last
// layers).
//
// Ranges are those of fake_quant.h with float16 parameters, the other codes
// row_codes.h's. `think` and `low-rank` look at the whole window, as at a
// prompt: later tokens of it help earlier ones, in their favour.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/evaluate/evaluate.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/reference_decoder.h"
#include "plan/plan.h"

namespace kvasir::compress {

// Owns: the transform. `candidate.transform` points to it.
struct Baseline {
  std::unique_ptr<CacheTransform> transform;
  Candidate candidate;
};

// Whether `name` begins as a baseline's does ("kivi:...").
bool IsBaselineName(const std::string& name);

// "fp8:, ggml:, ... or think:", for messages.
std::string BaselineMethods();

// A compressed model that keeps other tokens exact than its plan says, beside
// codes: "FOLDER:sinks=4,window=128"; either may be left out, and is the plan's
// then.
struct PlannedName {
  std::string folder;
  std::string settings;  // "sinks=4,window=128"; empty: none
  plan::ExactTokens exact;
};
// What stands behind a folder's last colon and has no "=" belongs to it.
// Errors: InvalidArgument for other settings, or numbers out of range.
absl::StatusOr<PlannedName> ParsePlannedName(const std::string& text);

struct BaselineRequest {
  std::string name;
  // Uncompressed; outlives the baseline.
  const ReferenceDecoder* decoder = nullptr;
  // For per-channel: token ids [B, T] of a calibration text.
  at::Tensor calibration_ids;
};

// Bytes per token are those of codes and parameters, without padding of pages.
// Errors: InvalidArgument for a name that is none, or numbers out of range,
//   with what is wanted; FailedPrecondition for a calibration that is missing.
absl::StatusOr<Baseline> MakeBaseline(const BaselineRequest& request);

}  // namespace kvasir::compress
