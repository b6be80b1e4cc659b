// The flags of `kvasir bench decode`, and the results of measured decode steps:
// the bytes that they read and the time of each part.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "bench/tool/engine.h"
#include "bench/tool/report.h"
#include "nlohmann/json.hpp"
#include "worker/executor/step/step_profile.h"
#include "worker/load/model_options.h"

namespace kvasir::cli {

struct DecodeFlags {
  BenchFlags bench;
  ModelOptions model;
  int64_t context = 512;
  int64_t batch = 8;
  int64_t steps = 2;
  bool breakdown = false;
  // The plans whose caches are compared with an uncompressed cache.
  std::vector<std::string> plans;
  std::string baseline;
  // If true, decode steps of the model are compared with those of the same
  // model without biases, both with the same plan.
  bool bias_cost = false;
  std::string fill = "auto";
  bool paced = false;
  int tp = 1;

  bool compares() const {
    return !plans.empty() || !baseline.empty() || bias_cost;
  }
};

// The measurements of several decode steps with one batch size, summed over the
// steps.
struct DecodeSample {
  double seconds = 0.0;
  double weight_bytes = 0.0;
  double cache_bytes = 0.0;
  worker::CpuStepProfile::Seconds parts = {};

  double bytes() const { return weight_bytes + cache_bytes; }
};
absl::StatusOr<DecodeSample> DecodeSteps(BenchEngine* engine, int64_t batch,
                                         int64_t steps);

// The share of each part in the time of a step: {"attention": 0.41, ...}; the
// sum is 1.
nlohmann::ordered_json BreakdownOf(const worker::CpuStepProfile::Seconds& sum);
void AddParts(const DecodeSample& sample, worker::CpuStepProfile::Seconds* sum);

// Starts sequences 1 .. batch with `context` tokens each, in the way that
// --fill names.
absl::Status FillEngine(const DecodeFlags& flags, BenchEngine* engine);

// Compares decode steps over compressed caches with steps over the uncompressed
// cache of the same model, in pairs.
absl::StatusOr<BenchReport> RunDecodeComparison(DecodeFlags flags);

// Compares steps of `tp` ranks with steps of one rank.
absl::StatusOr<BenchReport> RunDecodeRanks(DecodeFlags flags);

}  // namespace kvasir::cli
