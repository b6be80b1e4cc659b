// Load whose own cost is small and the same for every protocol: requests that
// were encoded once, answers that are counted and not read.
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

// A protocol's call for tokens, ready to be sent.
struct RawCall {
  std::string method;
  // A request without its id, and the id's field, which is appended: protobuf
  // takes fields in any order.
  grpc::Slice request;
  int id_field = 0;
  // How many tokens a message of the answer brings; -1: it is none of the
  // protocol's, or an error.
  std::function<int64_t(const grpc::ByteBuffer&)> tokens_in;
};

// The same prompt and number of tokens, each as its protocol has it: a worker's
// own, the KServe facade's, the VllmEngine facade's, the vllm.Inference
// facade's (ids alone: no text is asked for).
RawCall WorkerRawCall(int64_t prompt_tokens, uint32_t max_tokens);
RawCall KserveRawCall(const std::string& model, int64_t prompt_tokens,
                      uint32_t max_tokens);
RawCall VllmEngineRawCall(int64_t prompt_tokens, uint32_t max_tokens);
RawCall VllmInferenceRawCall(int64_t prompt_tokens, uint32_t max_tokens);

struct RawRound {
  absl::Duration took;
  std::vector<double> first_ms;  // until an answer's first message
  std::vector<double> total_ms;
  int64_t tokens = 0;  // where they were asked for
};

// Owns: its connections. Threads: one at a time; calls run on gRPC's.
class RawLoad {
 public:
  // Null credentials: plain text.
  RawLoad(const std::string& target,
          const std::shared_ptr<grpc::ChannelCredentials>& credentials);
  ~RawLoad();

  // `requests` in all, `concurrency` of them at a time. `read`: answers are
  // decoded, and their tokens counted. The first error of a call.
  absl::StatusOr<RawRound> Run(const RawCall& call, int requests,
                               int concurrency, bool read);

 private:
  struct Connections;
  const std::unique_ptr<Connections> connections_;
  uint64_t next_id_ = 0;
};

}  // namespace kvasir::cli
