#include "router/facades/kserve/backend.h"

#include <algorithm>

#include "router/facades/kserve/stream.h"

namespace kvasir::router {
namespace {

void Add(absl::Duration duration, inference::StatisticDuration* total) {
  total->set_count(total->count() + 1);
  total->set_ns(total->ns() +
                static_cast<uint64_t>(absl::ToInt64Nanoseconds(duration)));
}

}  // namespace

void KserveStatistics::Record(const std::string& model,
                              const Outcome& outcome) {
  base::MutexLock lock(&mutex_);
  inference::ModelStatistics& statistics = models_[model];
  inference::InferStatistics* totals = statistics.mutable_inference_stats();
  if (!outcome.ok) {
    Add(outcome.total, totals->mutable_fail());
    return;
  }
  statistics.set_inference_count(statistics.inference_count() + 1);
  statistics.set_execution_count(statistics.execution_count() + 1);
  statistics.set_last_inference(
      static_cast<uint64_t>(absl::ToUnixMillis(outcome.end)));
  Add(outcome.total, totals->mutable_success());
  Add(outcome.queue, totals->mutable_queue());
  // Count the request in all three compute durations, because clients require
  // their counts to be equal. compute_output gets the rest of the total time.
  Add(outcome.input, totals->mutable_compute_input());
  Add(outcome.compute, totals->mutable_compute_infer());
  Add(std::max(absl::ZeroDuration(),
               outcome.total - outcome.input - outcome.queue - outcome.compute),
      totals->mutable_compute_output());
}

inference::ModelStatistics KserveStatistics::StatisticsOf(
    const std::string& model) const {
  base::MutexLock lock(&mutex_);
  const auto found = models_.find(model);
  if (found != models_.end()) return found->second;
  inference::ModelStatistics none;
  none.mutable_inference_stats();
  return none;
}

void KserveStreams::Add(const std::shared_ptr<KserveStream>& stream) {
  base::MutexLock lock(&mutex_);
  streams_.emplace(stream.get(), stream);
  if (ended_) stream->OnDrain();
}

void KserveStreams::Remove(const KserveStream* stream) {
  base::MutexLock lock(&mutex_);
  streams_.erase(stream);
}

void KserveStreams::BeginDrain() {
  base::MutexLock lock(&mutex_);
  DrainAll();
}

void KserveStreams::EndAll() {
  base::MutexLock lock(&mutex_);
  ended_ = true;
  DrainAll();
}

void KserveStreams::DrainAll() {
  for (const auto& [key, weak] : streams_) {
    if (const auto stream = weak.lock()) stream->OnDrain();
  }
}

}  // namespace kvasir::router
