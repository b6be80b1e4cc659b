// Baselines: caches with which plans are compared. They code or reduce the keys
// and values of the uncompressed model. Most of them cannot be expressed by a
// plan. Their names:
//
// - "per-token:k4,v4" codes keys and values in 4 bits, with a range per token
//   and head. With k16, or without a setting for keys, keys are stored in bf16;
//   the same holds for values.
// - "kivi:2,group=32,residual=128" codes in 2 bits: keys in blocks of 32 tokens
//   with a range per channel, values in runs of 32 channels with a range per
//   token. The 128 tokens nearest to the query stay exact.
// - "per-channel:k3.pre" codes keys before (pre) or after (post) their rotation
//   in ranges per channel, which are measured on a calibration text. With
//   ",v4", values are coded per token.
// - "think:0.5,4" keeps half of the key channels and codes them in 4 bits per
//   token. It keeps the channels with the largest product of query and key
//   magnitudes in each head and sequence. With ",v4", values are coded per
//   token.
// - "low-rank:160/1024" reduces the keys of a window of text, before their
//   rotation, to 160/1024 of their full rank by an SVD, without codes.
// - "rotated:k4,v4" uses TurboQuant's codes as in vLLM: the key or value of a
//   head is rotated and rounded to Lloyd-Max levels, which are scaled by one
//   stored number per head.
// - "ggml:kq8_0,vq4_0" uses llama.cpp's codes per head. Numbers are multiplied
//   by a Hadamard matrix before coding and by its inverse afterwards, unless
//   the name has rotation=off.
// - "oscar:2,group=128" uses OSCAR's codes (oscar.h): keys and values are
//   rotated, clipped and coded in 2 bits with a range per token and group of
//   128 channels. Smaller heads are one group. The rotations are measured on a
//   calibration text. key-clip=0.96 clips the largest 4 % of a key's numbers,
//   and value-clip=0.92 the largest 8 % of a value's. These settings, sinks=64
//   and window=256 are the paper's and need not be given. head_dim must be a
//   power of two.
// - "fp8:e4m3" or "fp8:e5m2" rounds each number to an 8-bit float.
//
// Every name may also say what stays exact: sinks=4 (the first 4 tokens),
// window=128 (the 128 tokens nearest to the query; kivi has `residual`
// instead), skip=2 (the first 2 and the last 2 layers).
//
// Codes in ranges are computed by fake_quant.h with float16 parameters, all
// other codes by row_codes.h. `think` and `low-rank` see the whole window of
// text at once, as if it were a prompt. So later tokens influence what is kept
// of earlier tokens, which favours these two baselines.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "compress/evaluate/evaluate.h"
#include "compress/evaluate/oscar.h"
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

// Returns the beginnings of all names, for error texts: "fp8:, ggml:, ... or
// think:".
std::string BaselineMethods();

// The name of a compressed model, such as "FOLDER:sinks=4,window=128". The
// settings replace the plan's numbers of exact tokens. If a setting is left
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
  // Used only by per-channel and oscar: token ids [B, T] of a calibration text.
  at::Tensor calibration_ids;
  int threads = 1;  // for measuring on the calibration text
  // If set and empty, oscar stores here what it measures on the calibration
  // text. If not empty, oscar uses it instead of measuring. So several oscar
  // baselines of the same model and text measure only once.
  std::vector<OscarSums>* oscar_sums = nullptr;
};

// Makes the baseline that `request.name` describes. Its bytes per token include
// codes and parameters, but not the padding of pages.
// Errors: InvalidArgument, with what is allowed, for an unknown name or a
//   number out of range; FailedPrecondition if a calibration text is needed and
//   missing.
absl::StatusOr<Baseline> MakeBaseline(const BaselineRequest& request);

}  // namespace kvasir::compress
