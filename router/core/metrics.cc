#include "router/core/metrics.h"

#include <vector>

#include "base/net/metrics_server.h"

namespace kvasir::router {
namespace {

constexpr ReplicaState kStates[] = {
    ReplicaState::kConnecting, ReplicaState::kReady, ReplicaState::kDraining,
    ReplicaState::kHung,       ReplicaState::kLost,  ReplicaState::kRefused};

}  // namespace

prometheus::Histogram& RouterMetrics::AddHistogram(
    const std::string& name, const std::string& help,
    const std::vector<double>& buckets) {
  return prometheus::BuildHistogram()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add({}, buckets);
}

prometheus::Gauge& RouterMetrics::AddGauge(const std::string& name,
                                           const std::string& help) {
  return prometheus::BuildGauge()
      .Name(name)
      .Help(help)
      .Register(*registry_)
      .Add({});
}

RouterMetrics::RouterMetrics(const std::string& version)
    : registry_(std::make_shared<prometheus::Registry>()),
      requests_(prometheus::BuildCounter()
                    .Name("kvasir_router_requests_total")
                    .Help("Requests that ended, by facade and finish reason")
                    .Register(*registry_)),
      refused_(prometheus::BuildCounter()
                   .Name("kvasir_router_requests_refused_total")
                   .Help("Refused requests, by status code")
                   .Register(*registry_)),
      retries_(prometheus::BuildCounter()
                   .Name("kvasir_router_retries_total")
                   .Help("Requests sent to another replica after a failed "
                         "attempt, by the failure's status code")
                   .Register(*registry_)),
      output_tokens_(prometheus::BuildCounter()
                         .Name("kvasir_router_output_tokens_total")
                         .Help("Output tokens of requests that ended")
                         .Register(*registry_)
                         .Add({})),
      in_flight_(AddGauge("kvasir_router_inflight_requests",
                          "Accepted requests that have not ended")),
      queued_(AddGauge("kvasir_router_queued_requests",
                       "Accepted requests that wait in the router")),
      replicas_(prometheus::BuildGauge()
                    .Name("kvasir_router_replicas")
                    .Help("Replicas by state")
                    .Register(*registry_)),
      dispatch_(
          AddHistogram("kvasir_router_dispatch_seconds",
                       "Time from accepting a request to opening its stream",
                       base::FineBuckets())),
      time_to_first_token_(
          AddHistogram("kvasir_router_time_to_first_token_seconds",
                       "Time from accepting a request to its first token",
                       base::TimeToFirstTokenBuckets())),
      inter_token_(AddHistogram("kvasir_router_inter_token_latency_seconds",
                                "Time between two tokens of a sample",
                                base::InterTokenBuckets())),
      duration_(AddHistogram("kvasir_router_request_seconds",
                             "Time from accepting a request to its end",
                             base::RequestPhaseBuckets())) {
  prometheus::BuildGauge()
      .Name("kvasir_router_build_info")
      .Help("Always 1, with the version")
      .Register(*registry_)
      .Add({{"version", version}})
      .Set(1);
  // Create these time series now, with value 0. Otherwise Prometheus would not
  // see their first increment as a change.
  for (const ReplicaState state : kStates) {
    replicas_.Add({{"state", ReplicaStateName(state)}});
  }
  for (const absl::StatusCode code :
       {absl::StatusCode::kResourceExhausted, absl::StatusCode::kUnavailable}) {
    refused_.Add({{"code", absl::StatusCodeToString(code)}});
    retries_.Add({{"code", absl::StatusCodeToString(code)}});
  }
}

void RouterMetrics::OnRefused(const absl::Status& why) {
  refused_.Add({{"code", absl::StatusCodeToString(why.code())}}).Increment();
}

void RouterMetrics::OnDispatched(absl::Duration waited) {
  dispatch_.Observe(absl::ToDoubleSeconds(waited));
}

void RouterMetrics::OnFirstToken(absl::Duration since_submit) {
  time_to_first_token_.Observe(absl::ToDoubleSeconds(since_submit));
}

// If several tokens have arrived together, each gets an equal part of the gap.
void RouterMetrics::OnInterToken(absl::Duration gap, size_t tokens) {
  if (tokens == 0) return;
  const double each = absl::ToDoubleSeconds(gap) / static_cast<double>(tokens);
  for (size_t i = 0; i < tokens; ++i) inter_token_.Observe(each);
}

void RouterMetrics::OnRetry(const absl::Status& why) {
  retries_.Add({{"code", absl::StatusCodeToString(why.code())}}).Increment();
}

void RouterMetrics::OnRequestEnd(const AccessRecord& record) {
  requests_
      .Add({{"facade", record.facade}, {"finish_reason", record.finish_reason}})
      .Increment();
  output_tokens_.Increment(record.output_tokens);
  duration_.Observe(absl::ToDoubleSeconds(record.duration));
}

void RouterMetrics::OnReplicaState(const std::string& target,
                                   ReplicaState state) {
  base::MutexLock lock(&mutex_);
  states_[target] = state;
  CountStates();
}

void RouterMetrics::OnReplicaRemoved(const std::string& target) {
  base::MutexLock lock(&mutex_);
  states_.erase(target);
  CountStates();
}

void RouterMetrics::CountStates() {
  for (const ReplicaState one : kStates) {
    int count = 0;
    for (const auto& [unused, current] : states_) count += current == one;
    replicas_.Add({{"state", ReplicaStateName(one)}}).Set(count);
  }
}

void RouterMetrics::OnInFlight(size_t in_flight, size_t queued) {
  in_flight_.Set(static_cast<double>(in_flight));
  queued_.Set(static_cast<double>(queued));
}

}  // namespace kvasir::router
