#include "bench/tool/load_generator.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "bench/paired.h"

namespace kvasir::cli {
namespace {

struct PlannedRequest {
  // the time from the start until the request is due; zero in a closed loop
  absl::Duration due;
  TokenRequest request;
};

std::vector<PlannedRequest> PlanRequests(const LoadOptions& options) {
  std::mt19937_64 random(options.seed);
  std::uniform_int_distribution<int32_t> token(0, options.vocab_size - 1);
  std::vector<PlannedRequest> planned(
      static_cast<size_t>(options.num_requests));
  double due_seconds = 0.0;
  int index = 0;
  for (PlannedRequest& one : planned) {
    if (options.rate > 0) {
      one.due = absl::Seconds(due_seconds);
      due_seconds += std::exponential_distribution<>(options.rate)(random);
    }
    const int64_t prompt = std::min(options.prompt_tokens.Sample(&random),
                                    options.max_model_len - 1);
    const int64_t output = std::min(options.output_tokens.Sample(&random),
                                    options.max_model_len - prompt);
    one.request.model = options.model;
    one.request.request_id =
        absl::StrCat(options.name, "-", options.seed, "-", index++);
    one.request.max_tokens = static_cast<uint32_t>(output);
    one.request.prompt_ids.resize(static_cast<size_t>(prompt));
    for (int32_t& id : one.request.prompt_ids) id = token(random);
  }
  return planned;
}

Percentiles PercentilesOf(const std::vector<double>& values) {
  if (values.empty()) return {};
  return {.p50 = bench::Quantile(values, 0.5),
          .p90 = bench::Quantile(values, 0.9),
          .p95 = bench::Quantile(values, 0.95),
          .p99 = bench::Quantile(values, 0.99)};
}

// Collects results from all client threads.
class Collector {
 public:
  explicit Collector(const LoadOptions& options) : options_(options) {}

  // `late` is the delay between the time at which the request was due and the
  // time at which it was sent.
  void Add(const TokenRequest& request, absl::Duration late,
           const absl::StatusOr<TokenResult>& result) {
    base::MutexLock lock(&mutex_);
    ++done_;
    if (options_.progress) options_.progress(done_);
    if (!result.ok()) {
      ++sums_.failed;
      sums_.first_error.Update(result.status());
      return;
    }
    ++sums_.succeeded;
    sums_.prompt_tokens += static_cast<int64_t>(request.prompt_ids.size());
    sums_.output_tokens += result->num_tokens();
    end_to_end_.push_back(absl::ToDoubleMilliseconds(late + result->total));
    const auto& arrivals = result->arrivals;
    for (size_t i = 0; i < arrivals.size(); ++i) {
      if (i == 0) {
        first_token_.push_back(
            absl::ToDoubleMilliseconds(late + arrivals[i].at));
        continue;
      }
      const double gap =
          absl::ToDoubleMilliseconds(arrivals[i].at - arrivals[i - 1].at);
      const auto tokens = static_cast<size_t>(arrivals[i].num_tokens);
      inter_token_.insert(inter_token_.end(), tokens,
                          gap / static_cast<double>(tokens));
    }
  }

  LoadResult Result(double seconds) {
    base::MutexLock lock(&mutex_);
    LoadResult result = sums_;
    result.seconds = seconds;
    result.first_token_ms = PercentilesOf(first_token_);
    result.inter_token_ms = PercentilesOf(inter_token_);
    result.end_to_end_ms = PercentilesOf(end_to_end_);
    return result;
  }

 private:
  const LoadOptions& options_;
  base::Mutex mutex_;
  int64_t done_ ABSL_GUARDED_BY(mutex_) = 0;
  LoadResult sums_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> first_token_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> inter_token_ ABSL_GUARDED_BY(mutex_);
  std::vector<double> end_to_end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<LengthDistribution> LengthDistribution::Parse(
    const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  LengthDistribution result;
  const auto number = [&parts](size_t index, double* out) {
    return index < parts.size() && absl::SimpleAtod(parts[index], out) &&
           std::isfinite(*out);
  };
  bool good = number(1, &result.first_) && result.first_ >= 1;
  if (parts[0] == "fixed") {
    good = good && parts.size() == 2;
  } else if (parts[0] == "uniform") {
    result.kind_ = Kind::kUniform;
    good = good && parts.size() == 3 && number(2, &result.second_) &&
           result.second_ >= result.first_;
  } else if (parts[0] == "lognormal") {
    result.kind_ = Kind::kLognormal;
    good = good && parts.size() == 3 && number(2, &result.second_) &&
           result.second_ >= 0;
  } else {
    good = false;
  }
  if (good && result.first_ <= 1e9 && result.second_ <= 1e9) return result;
  return absl::InvalidArgumentError(absl::StrCat(
      "'", text,
      "' is not a distribution of lengths: want fixed:N, "
      "uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA, with lengths "
      "from 1 to 1e9, HIGH at least LOW, and SIGMA from 0 to 1e9"));
}

int64_t LengthDistribution::Sample(std::mt19937_64* random) const {
  double value = first_;
  if (kind_ == Kind::kUniform) {
    value = static_cast<double>(std::uniform_int_distribution<int64_t>(
        static_cast<int64_t>(first_), static_cast<int64_t>(second_))(*random));
  } else if (kind_ == Kind::kLognormal) {
    value = std::lognormal_distribution<>(std::log(first_), second_)(*random);
  }
  return static_cast<int64_t>(std::clamp(value, 1.0, 1e9));
}

int64_t LengthDistribution::longest() const {
  return static_cast<int64_t>(kind_ == Kind::kUniform ? second_ : first_);
}

LengthDistribution LengthDistribution::CutTo(int64_t most) const {
  const auto limit = static_cast<double>(std::max(most, int64_t{1}));
  LengthDistribution cut = *this;
  cut.first_ = std::min(first_, limit);
  if (kind_ == Kind::kUniform) cut.second_ = std::min(second_, limit);
  return cut;
}

absl::Status CheckLengths(const LengthDistribution& prompt_tokens,
                          const LengthDistribution& output_tokens,
                          int64_t max_model_len) {
  const int64_t prompt = prompt_tokens.longest();
  const int64_t output = output_tokens.longest();
  if (prompt + output <= max_model_len) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--prompt-tokens of up to ", prompt, " plus --output-tokens of up to ",
      output, " are over the limit of ", max_model_len,
      " tokens (the model's length)"));
}

LoadResult RunLoad(const LoadOptions& options, TokenClient* client) {
  const std::vector<PlannedRequest> planned = PlanRequests(options);
  Collector collector(options);
  std::atomic<size_t> next{0};
  const absl::Time start = absl::Now();
  const auto run = [&] {
    for (;;) {
      const size_t index = next.fetch_add(1);
      if (index >= planned.size()) return;
      const PlannedRequest& one = planned[index];
      absl::Duration late;
      if (options.rate > 0) {
        absl::SleepFor(start + one.due - absl::Now());
        late = std::max(absl::Now() - (start + one.due), absl::ZeroDuration());
      }
      collector.Add(one.request, late, client->Generate(one.request));
    }
  };
  {
    std::vector<std::jthread> threads;
    const int count = std::min(options.concurrency, options.num_requests);
    for (int i = 0; i < count; ++i) threads.emplace_back(run);
  }
  return collector.Result(absl::ToDoubleSeconds(absl::Now() - start));
}

}  // namespace kvasir::cli
