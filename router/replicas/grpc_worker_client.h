// The implementation of WorkerClient with gRPC's callback API.
#pragma once

#include <grpcpp/security/credentials.h>

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "router/replicas/worker_client.h"

namespace kvasir::router {

struct GrpcWorkerClientOptions {
  // Requests are distributed over several connections, because all streams of
  // one connection share a flow-control window and a lock.
  int num_connections = 2;
  // If nothing arrives on a connection for keepalive_time, the client sends a
  // ping. If no answer comes within keepalive_timeout, the connection is
  // closed. An infinite keepalive_time, for a worker in this process, means no
  // pings.
  absl::Duration keepalive_time = absl::Seconds(5);
  absl::Duration keepalive_timeout = absl::Seconds(2);
  int64_t max_receive_message_bytes = 64 << 20;
  // If null, the connections are not encrypted.
  std::shared_ptr<grpc::ChannelCredentials> credentials;
};

// Creates a client for a worker. It connects when it is first used.
std::unique_ptr<WorkerClient> NewGrpcWorkerClient(
    const WorkerAddress& worker, const GrpcWorkerClientOptions& options);

}  // namespace kvasir::router
