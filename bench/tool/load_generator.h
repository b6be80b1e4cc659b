// Puts load on a server. In a closed loop, each client waits for its answer
// before it sends the next request. In an open loop, requests are sent at
// random times.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "bench/tool/token_client.h"

namespace kvasir::cli {

// A distribution of lengths in tokens: "fixed:128", "uniform:16:256" (both ends
// included), or "lognormal:128:0.5" (median, sigma of the logarithm). Lengths
// are at least 1.
class LengthDistribution {
 public:
  static absl::StatusOr<LengthDistribution> Parse(const std::string& text);
  int64_t Sample(std::mt19937_64* random) const;
  // The longest possible length. For a lognormal distribution, which has no
  // limit, it is the median.
  int64_t longest() const;
  // Returns the same distribution, in which lengths above `most` (at least 1)
  // become `most`.
  LengthDistribution CutTo(int64_t most) const;

 private:
  enum class Kind { kFixed, kUniform, kLognormal };
  Kind kind_ = Kind::kFixed;
  double first_ = 1;
  double second_ = 0;
};

struct LoadOptions {
  std::string model;
  std::string name = "load";  // prefix of the requests' ids
  int num_requests = 0;
  // Closed loop: the number of requests that run at the same time. Open loop:
  // the most requests that may run at the same time; further ones are sent
  // late, and their latency includes the delay.
  int concurrency = 1;
  // Requests per second with exponential gaps (Poisson); 0: closed loop.
  double rate = 0.0;
  LengthDistribution prompt_tokens;
  LengthDistribution output_tokens;
  // prompts and outputs are shortened to fit into it
  int64_t max_model_len = 0;
  int32_t vocab_size = 0;
  uint64_t seed = 1;
  std::function<void(int64_t done)> progress;  // called by one thread at a time
};

struct Percentiles {
  double p50 = 0.0;
  double p90 = 0.0;
  double p95 = 0.0;
  double p99 = 0.0;
};

// INVALID_ARGUMENT if the longest prompt and output do not fit into the model's
// length. For lognormal distributions only the medians must fit, because longer
// samples are shortened.
absl::Status CheckLengths(const LengthDistribution& prompt_tokens,
                          const LengthDistribution& output_tokens,
                          int64_t max_model_len);

// The result of a load. Latencies are in milliseconds from the time at which a
// request was due.
struct LoadResult {
  int64_t succeeded = 0;
  int64_t failed = 0;
  absl::Status first_error;
  double seconds = 0.0;  // from the first request to the last answer
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;
  Percentiles first_token_ms;
  // The time between two responses, divided by the tokens of the second one.
  Percentiles inter_token_ms;
  Percentiles end_to_end_ms;
};

LoadResult RunLoad(const LoadOptions& options, TokenClient* client);

}  // namespace kvasir::cli
