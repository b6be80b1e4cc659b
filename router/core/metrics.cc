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
      moves_(prometheus::BuildCounter()
                 .Name("kvasir_router_moves_total")
                 .Help("Requests with output that went on at another replica, "
                       "by the reason for leaving the last one")
                 .Register(*registry_)),
      moved_tokens_(prometheus::BuildCounter()
                        .Name("kvasir_router_moved_tokens_total")
                        .Help("Tokens that replicas had to prefill because "
                              "requests with output moved")
                        .Register(*registry_)
                        .Add({})),
      kept_bytes_(AddGauge("kvasir_router_kept_output_bytes",
                           "Output tokens of running requests that are kept so "
                           "that the requests can move")),
      replica_moves_(prometheus::BuildGauge()
                         .Name("kvasir_router_replica_moves")
                         .Help("Replicas in use by how their streams may move")
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
  for (const MoveReason reason :
       {MoveReason::kLost, MoveReason::kHung, MoveReason::kDrained,
        MoveReason::kAborted, MoveReason::kRefused}) {
    moves_.Add({{"reason", MoveReasonName(reason)}});
  }
  for (const MoveStreams moves :
       {MoveStreams::kOff, MoveStreams::kExact, MoveStreams::kRounding}) {
    replica_moves_.Add({{"moves", MoveStreamsName(moves)}});
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

void RouterMetrics::OnMove(MoveReason reason, uint64_t tokens) {
  moves_.Add({{"reason", MoveReasonName(reason)}}).Increment();
  moved_tokens_.Increment(static_cast<double>(tokens));
}

void RouterMetrics::OnKeptBytes(int64_t bytes) {
  kept_bytes_.Increment(static_cast<double>(bytes));
}

void RouterMetrics::OnReplicasByMoves(MoveStreams moves, size_t replicas) {
  replica_moves_.Add({{"moves", MoveStreamsName(moves)}})
      .Set(static_cast<double>(replicas));
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
