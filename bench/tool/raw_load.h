// Load with a small cost of its own that is the same for every protocol:
// requests are encoded once, and answers are counted but not decoded.
#pragma once

#include <grpcpp/security/credentials.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace kvasir::cli {

// A call for tokens in one protocol, ready to be sent.
struct RawCall {
  std::string method;
  // A request without its id, and the field of the id, which is appended.
  // Protobuf accepts fields in any order.
  grpc::Slice request;
  int id_field = 0;
  // The number of tokens in a message of the answer; -1 for an error, or if it
  // is not a message of the protocol.
  std::function<int64_t(const grpc::ByteBuffer&)> tokens_in;
};

// Requests with the same prompt and number of tokens in four protocols:
// kvasir.v1, KServe, VllmEngine, and vllm.Inference (token ids only, no text).
RawCall WorkerRawCall(int64_t prompt_tokens, uint32_t max_tokens);
RawCall KserveRawCall(const std::string& model, int64_t prompt_tokens,
                      uint32_t max_tokens);
RawCall VllmEngineRawCall(int64_t prompt_tokens, uint32_t max_tokens);
RawCall VllmInferenceRawCall(int64_t prompt_tokens, uint32_t max_tokens);

struct RawRound {
  absl::Duration took;
  std::vector<double> first_ms;  // until the first message of an answer
  std::vector<double> total_ms;
  int64_t tokens = 0;  // only if the tokens are counted
};

// Owns: its connections. Threads: one at a time; calls run on gRPC's.
class RawLoad {
 public:
  // Null credentials mean plain text.
  RawLoad(const std::string& target,
          const std::shared_ptr<grpc::ChannelCredentials>& credentials);
  ~RawLoad();

  // Runs `requests` calls, `concurrency` at a time. If `read`, answers are
  // decoded and their tokens counted. Returns the first error of a call.
  absl::StatusOr<RawRound> Run(const RawCall& call, int requests,
                               int concurrency, bool read);

 private:
  struct Connections;
  const std::unique_ptr<Connections> connections_;
  uint64_t next_id_ = 0;
};

}  // namespace kvasir::cli
