// Baselines: caches with which plans are compared. Most of them cannot be
// expressed by a plan. They code or reduce the keys and values of the
// uncompressed model. Their names:
//
//   per-token:k4,v4          codes of 4 bits with a range per token and head;
//                            k16 or v16, the default, is an uncoded bf16 side
//   kivi:2,group=32,residual=128
//                            codes of 2 bits: keys with a range per channel
//                            and block of `group` tokens, values with a range
//                            per token and run of `group` channels; the
//                            `residual` tokens nearest to the query stay exact
//   per-channel:k3.pre       keys with a range per channel that comes from a
//                            calibration text, coded before (pre) or after
//                            (post) their rotation; ",v4": values per token
//   think:0.5,4              half of the key channels, namely those with the
//                            greatest |q| |k| in this head and sequence, coded
//                            in 4 bits per token; ",v4": values per token
//   low-rank:160/1024        keys before their rotation, reduced to rank 160 of
//                            1024 by the SVD of the window, as exact numbers
//   rotated:k4,v4            TurboQuant's codes per token and head, as in vLLM:
//                            rotated, one norm, Lloyd-Max levels
//   ggml:kq8_0,vq4_0         llama.cpp's codes, per head, between a Hadamard
//                            matrix and its inverse (rotation=off: plain)
//   fp8:e4m3                 each number rounded to an 8-bit float (or e5m2)
//
// Every name may also say what stays exact: sinks=4 (the first 4 tokens),
// window=128 (the 128 tokens nearest to the query; kivi has `residual`
// instead), skip=2 (the first 2 and the last 2 layers).
//
// Codes in ranges are computed by fake_quant.h with float16 parameters, the
// other codes by row_codes.h. `think` and `low-rank` see the whole window of
// text at once, as if it were a prompt: later tokens influence what is kept of
// earlier tokens, which favours these two baselines.
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

// A candidate that applies a baseline's codes to an uncompressed model. Owns
// the transform to which `candidate.transform` points.
struct Baseline {
  std::unique_ptr<CacheTransform> transform;
  Candidate candidate;
};

// Returns whether `name` begins with the name of a baseline's method, such as
// "kivi:...".
bool IsBaselineName(const std::string& name);

// The beginnings of all names, "fp8:, ggml:, ... or think:", for error texts.
std::string BaselineMethods();

// The name of a compressed model and, optionally, numbers of exact tokens that
// replace those in its plan: "FOLDER:sinks=4,window=128". If a setting is left
// out, the plan's number is used.
struct PlannedName {
  std::string folder;
  std::string settings;  // "sinks=4,window=128"; empty: none
  plan::ExactTokens exact;
};
// Splits a name into folder and settings. If the text after the last colon
// contains no "=", the whole name is the folder.
// Errors: InvalidArgument for unknown settings and for numbers out of range.
absl::StatusOr<PlannedName> ParsePlannedName(const std::string& text);

struct BaselineRequest {
  std::string name;
  // An uncompressed model, which must outlive the baseline.
  const ReferenceDecoder* decoder = nullptr;
  // Used only by per-channel: token ids [B, T] of a calibration text.
  at::Tensor calibration_ids;
};

// Makes the baseline that `request.name` describes. Its bytes per token include
// codes and parameters, but not the padding of pages.
// Errors: InvalidArgument, with what is allowed, for an unknown name or a
//   number out of range; FailedPrecondition if a calibration text is needed and
//   missing.
absl::StatusOr<Baseline> MakeBaseline(const BaselineRequest& request);

}  // namespace kvasir::compress
