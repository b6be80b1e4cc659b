// A worker over gRPC's callback API.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

struct GrpcWorkerClientOptions {
  // Streams are spread over this many connections. With one, a single
  // flow-control window and a single lock would serve all of them.
  int num_connections = 2;
  // A connection on which nothing arrives for this time is pinged, and is given
  // up if the answer takes longer than the timeout. Infinite: no pings, for a
  // worker in this process, which can only be late if this process is.
  absl::Duration keepalive_time = absl::Seconds(5);
  absl::Duration keepalive_timeout = absl::Seconds(2);
  int64_t max_receive_message_bytes = 64 << 20;
  // Null: plain text.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

// `target`: "host:port" or "unix:/path". Connects when it is first used.
std::unique_ptr<WorkerClient> NewGrpcWorkerClient(
    const std::string& target, const GrpcWorkerClientOptions& options);

}  // namespace kvasir::router
