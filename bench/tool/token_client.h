// Clients for load tests that send and receive token ids, either through a
// router's KServe facade or directly to a worker.
#pragma once

#include <grpcpp/security/credentials.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/kvasir/v1/worker.pb.h"

namespace kvasir::cli {

// A request for greedy sampling of max_tokens tokens; end tokens do not stop
// it.
struct TokenRequest {
  std::string model;  // not sent to a worker
  std::string request_id;
  std::vector<int32_t> prompt_ids;
  uint32_t max_tokens = 1;
};

// The answer to a request. Times are relative to the start of the call.
struct TokenResult {
  struct Arrival {
    absl::Duration at;
    int64_t num_tokens = 0;
  };
  std::vector<Arrival> arrivals;  // one for each response with tokens
  absl::Duration total;

  int64_t num_tokens() const;
};

// Threads: any number of threads may call it at the same time.
class TokenClient {
 public:
  virtual ~TokenClient() = default;
  // Runs one request to its end. Returns the server's errors.
  virtual absl::StatusOr<TokenResult> Generate(const TokenRequest& request) = 0;
};

// A client of a router, which uses TensorRT-LLM's token schema over
// ModelStreamInfer.
std::unique_ptr<TokenClient> MakeRouterTokenClient(
    const std::string& endpoint,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

// A client of a worker, which uses kvasir.v1.Worker/Generate.
std::unique_ptr<TokenClient> MakeWorkerTokenClient(
    const std::string& endpoint,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials);

// Calls GetInfo of the worker and returns its answer.
absl::StatusOr<kvasir::v1::WorkerInfo> GetWorkerInfo(
    const std::string& endpoint,
    const std::shared_ptr<grpc::ChannelCredentials>& credentials,
    absl::Duration timeout);

}  // namespace kvasir::cli
