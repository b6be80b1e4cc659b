// What the ways of `kvasir bench decode` share: their flags, and decode steps
// with what they read and where their time went.
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
  // Comparison with a dense cache.
  std::vector<std::string> plans;
  std::string baseline;
  std::string fill = "auto";
  bool paced = false;
  int tp = 1;

  bool compares() const { return !plans.empty() || !baseline.empty(); }
};

// Some steps of one batch size.
struct DecodeSample {
  double seconds = 0.0;
  double weight_bytes = 0.0;
  double cache_bytes = 0.0;
  worker::CpuStepProfile::Seconds parts = {};

  double bytes() const { return weight_bytes + cache_bytes; }
};
absl::StatusOr<DecodeSample> DecodeSteps(BenchEngine* engine, int64_t batch,
                                         int64_t steps);

// Share of each part of a step: {"attention": 0.41, ...}, together 1.
nlohmann::ordered_json BreakdownOf(const worker::CpuStepProfile::Seconds& sum);
// `sum` += the parts of a sample.
void AddParts(const DecodeSample& sample, worker::CpuStepProfile::Seconds* sum);

// Sequences 1 .. batch of `context` tokens, as --fill says.
absl::Status FillEngine(const DecodeFlags& flags, BenchEngine* engine);

// Plans against the dense cache of the same model, in pairs.
absl::StatusOr<BenchReport> RunDecodeComparison(DecodeFlags flags);

// Steps of tp ranks against those of one.
absl::StatusOr<BenchReport> RunDecodeRanks(DecodeFlags flags);

}  // namespace kvasir::cli
