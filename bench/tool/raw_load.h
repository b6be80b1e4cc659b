// Puts load on a server at a small cost that is equal for all protocols:
// requests are encoded once, and answers are decoded only if Run is asked to.
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

// A generation request in one protocol, encoded so that it can be sent many
// times.
struct RawCall {
  std::string method;
  // The encoded request without its id, and the id's field number. Each call
  // appends its own id, because protobuf accepts fields in any order.
  grpc::Slice request;
  int id_field = 0;
  // Returns the number of tokens in a message of the answer; -1 if the message
  // is an error or not valid in the protocol.
  std::function<int64_t(const grpc::ByteBuffer&)> tokens_in;
};

// Each function makes a request in one protocol: kvasir.v1, KServe, VllmEngine,
// or vllm.Inference (with token ids instead of text). For equal arguments, the
// prompts are equal.
RawCall WorkerRawCall(int64_t prompt_tokens, uint32_t max_tokens);
RawCall KserveRawCall(const std::string& model, int64_t prompt_tokens,
                      uint32_t max_tokens);
RawCall VllmEngineRawCall(int64_t prompt_tokens, uint32_t max_tokens);
RawCall VllmInferenceRawCall(int64_t prompt_tokens, uint32_t max_tokens);

struct RawRound {
  absl::Duration took;
  // milliseconds until the first message of each answer
  std::vector<double> first_ms;
  std::vector<double> total_ms;
  int64_t tokens = 0;  // set only if the answers are decoded
};

// Owns: its connections.
// Threads: used by one thread at a time; calls run on gRPC's threads.
class RawLoad {
 public:
  // Null credentials mean plain text.
  RawLoad(const std::string& target,
          const std::shared_ptr<grpc::ChannelCredentials>& credentials);
  ~RawLoad();

  // Runs `requests` calls, `concurrency` of them at a time. If `read` is true,
  // answers are decoded and their tokens counted. Returns the first error of a
  // call.
  absl::StatusOr<RawRound> Run(const RawCall& call, int requests,
                               int concurrency, bool read);

 private:
  struct Connections;
  const std::unique_ptr<Connections> connections_;
  uint64_t next_id_ = 0;
};

}  // namespace kvasir::cli
