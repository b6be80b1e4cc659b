#include "router/core/metrics.h"

#include <string>

#include "gtest/gtest.h"
#include "prometheus/text_serializer.h"

namespace kvasir::router {
namespace {

std::string Text(const RouterMetrics& metrics) {
  return prometheus::TextSerializer().Serialize(metrics.registry()->Collect());
}

TEST(RouterMetricsTest, CountsEndedRequestsByFacadeAndFinishReason) {
  RouterMetrics metrics("1");
  AccessRecord record;
  record.facade = "kserve";
  record.finish_reason = "length";
  record.output_tokens = 7;
  record.duration = absl::Seconds(2);
  metrics.OnRequestEnd(record);
  const std::string text = Text(metrics);
  EXPECT_NE(text.find("kvasir_router_requests_total{facade=\"kserve\",finish_"
                      "reason=\"length\"} 1\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("\nkvasir_router_output_tokens_total 7\n"),
            std::string::npos);
  EXPECT_NE(text.find("\nkvasir_router_request_seconds_sum 2\n"),
            std::string::npos);
}

TEST(RouterMetricsTest, EachReplicaIsCountedOnlyInItsCurrentState) {
  RouterMetrics metrics("1");
  metrics.OnReplicaState("a", ReplicaState::kReady);
  metrics.OnReplicaState("b", ReplicaState::kReady);
  metrics.OnReplicaState("a", ReplicaState::kLost);
  const std::string text = Text(metrics);
  EXPECT_NE(text.find("kvasir_router_replicas{state=\"ready\"} 1\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("kvasir_router_replicas{state=\"lost\"} 1\n"),
            std::string::npos);
  EXPECT_NE(text.find("kvasir_router_replicas{state=\"draining\"} 0\n"),
            std::string::npos);
}

TEST(RouterMetricsTest, ARemovedReplicaIsNotCounted) {
  RouterMetrics metrics("1");
  metrics.OnReplicaState("a", ReplicaState::kReady);
  metrics.OnReplicaRemoved("a");
  const std::string text = Text(metrics);
  EXPECT_NE(text.find("kvasir_router_replicas{state=\"ready\"} 0\n"),
            std::string::npos)
      << text;
}

TEST(RouterMetricsTest, CountsMovesByReasonAndTheTokensThatAreKeptForThem) {
  RouterMetrics metrics("1");
  metrics.OnKeptBytes(12);
  metrics.OnMove(MoveReason::kHung, 40);
  metrics.OnMove(MoveReason::kLost, 2);
  metrics.OnKeptBytes(-8);
  metrics.OnReplicasByMoves(MoveStreams::kExact, 3);
  const std::string text = Text(metrics);
  for (const char* line : {"kvasir_router_moves_total{reason=\"hung\"} 1\n",
                           "kvasir_router_moves_total{reason=\"lost\"} 1\n",
                           "kvasir_router_moves_total{reason=\"drained\"} 0\n",
                           "kvasir_router_moved_tokens_total 42\n",
                           "kvasir_router_kept_output_bytes 4\n",
                           "kvasir_router_replica_moves{moves=\"exact\"} 3\n",
                           "kvasir_router_replica_moves{moves=\"off\"} 0\n"}) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

TEST(RouterMetricsTest,
     TheTimeBetweenTwoDeliveriesIsDividedEquallyAmongTheirTokens) {
  RouterMetrics metrics("1");
  metrics.OnInterToken(absl::Milliseconds(8), 4);
  const std::string text = Text(metrics);
  EXPECT_NE(text.find("\nkvasir_router_inter_token_latency_seconds_count 4\n"),
            std::string::npos);
  EXPECT_NE(text.find("kvasir_router_inter_token_latency_seconds_bucket{le="
                      "\"0.002\"} 4\n"),
            std::string::npos)
      << text;
}

}  // namespace
}  // namespace kvasir::router
