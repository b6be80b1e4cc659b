// Builds one request's answer: engine events in, ModelInferResponses out. No
// gRPC, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.pb.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "router/facades/calls/answer_samples.h"
#include "router/facades/kserve/request.h"
#include "router/facades/text/text_codec.h"
#include "router/facades/text/text_stream.h"

namespace kvasir::router {

inline constexpr char kFinalResponseParameter[] = "triton_final_response";

// The data that an answer needs in addition to its request.
struct KserveAnswerContext {
  // Null only in kTrtTokens.
  std::shared_ptr<const TextCodec> codec;
  proto::TokenBytes prompt;
  std::vector<int32_t> eos_ids;
  // On ModelStreamInfer every response says whether it is the last.
  bool in_stream = true;
};

// Collects new output until a response is taken, so that a slow reader gets
// fewer and larger responses. Ends samples at stop strings, and leaves the
// token that ended a sample out of its text and ids.
//
// Threads: one at a time.
class KserveAnswer {
 public:
  KserveAnswer(KserveRequest request, KserveAnswerContext context);

  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Ends every running sample with reason "abort".
  void Stop();

  // Every sample has ended; the engine may stop working on the request.
  bool finished() const;
  // There is something to send. An answer in one response waits for its end.
  bool HasResponse() const;
  // Returns the next response. Precondition: HasResponse().
  inference::ModelInferResponse Take();
  // The last response has been taken.
  bool complete() const { return complete_; }

  // Bytes that wait to be taken and could be.
  size_t waiting_bytes() const;
  const KserveRequest& request() const { return request_; }

 private:
  struct Sample {
    std::unique_ptr<TextStream> text;
    // Empty while the sample runs.
    std::string finish_reason;
    // A token that may have ended the sample; it is dropped if nothing follows.
    std::optional<int32_t> maybe_last_id;
    kvasir::v1::TokenLogprob maybe_last_logprob;
    double cumulative_logprob = 0;
    // The fields below collect output since the last response. Take puts the
    // prompt in front if it is wanted.
    std::string new_text;
    std::vector<int32_t> new_ids;
    std::vector<float> new_logprobs;
    std::string new_logprobs_json;
    uint32_t num_new_tokens = 0;
  };

  bool IsTrt() const { return request_.schema != KserveSchema::kVllmText; }
  void AddToken(int32_t id, const kvasir::v1::TokenLogprob* logprob,
                bool in_text, Sample* sample);
  void AddLogprob(int32_t id, const kvasir::v1::TokenLogprob& logprob,
                  Sample* sample);
  void EndSample(const std::string& reason, Sample* sample);
  bool HasNewData(const Sample& sample) const;
  // Also counts log probabilities and counts, which cause no response of their
  // own while the request runs.
  bool HasNewOutputs(const Sample& sample) const;
  inference::ModelInferResponse NewResponse(bool is_final) const;
  void AddVllmOutputs(inference::ModelInferResponse* response) const;
  // The samples [first, first + count) in one response.
  void AddTrtOutputs(size_t first, size_t count,
                     inference::ModelInferResponse* response) const;
  void AddTrtIds(size_t first, size_t count,
                 inference::ModelInferResponse* response) const;
  void AddTrtLogprobs(size_t first, size_t count,
                      inference::ModelInferResponse* response) const;
  std::vector<std::string> Texts(size_t first, size_t count) const;

  const KserveRequest request_;
  const KserveAnswerContext context_;
  const EndingIds ending_ids_;
  std::vector<Sample> samples_;
  bool complete_ = false;
};

// Returns a response without outputs that ends the request with this id.
inference::ModelInferResponse EmptyFinalResponse(const std::string& model_name,
                                                 const std::string& id);

// The version that every model has for clients.
inline constexpr char kKserveModelVersion[] = "1";

}  // namespace kvasir::router
