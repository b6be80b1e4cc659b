// Builds the answer to one request from the engine's events, as a sequence of
// ModelInferResponses. Uses no gRPC, threads or clock.
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
  // May be null only in the schema kTrtTokens.
  std::shared_ptr<const TextCodec> codec;
  proto::TokenBytes prompt;
  std::vector<int32_t> eos_ids;
  // True for ModelStreamInfer. Then every response says whether it is the last.
  bool in_stream = true;
};

// The answer to one request. New output waits until Take puts it into a
// response, so a slow reader gets fewer and larger responses. A sample also
// ends when its text contains a stop string. A token that ended a sample is not
// part of its text and ids.
//
// Threads: only one thread at a time may use it.
class KserveAnswer {
 public:
  KserveAnswer(KserveRequest request, KserveAnswerContext context);

  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Ends every running sample with reason "abort".
  void Stop();

  // True if every sample has ended. Then the engine need not work on the
  // request any more.
  bool finished() const;
  // True if there is a response to send. An answer that is not streamed has
  // none before all samples have ended.
  bool HasResponse() const;
  // Returns the next response. Precondition: HasResponse().
  inference::ModelInferResponse Take();
  // True if the last response has been taken.
  bool complete() const { return complete_; }

  // Returns how many bytes of waiting output Take could return now.
  size_t waiting_bytes() const;
  const KserveRequest& request() const { return request_; }

 private:
  struct Sample {
    std::unique_ptr<TextStream> text;
    // Empty while the sample runs.
    std::string finish_reason;
    // The sample's newest token, if it may have ended the sample. The next
    // event shows whether it did. If not, the token is added to the output.
    std::optional<int32_t> maybe_last_id;
    kvasir::v1::TokenLogprob maybe_last_logprob;
    double cumulative_logprob = 0;
    // The fields below hold the output since the last response. new_text never
    // contains the prompt. If the prompt is wanted, Take adds it.
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
  // Returns true if the sample has any new output, including log probabilities
  // and counts. (While the request runs, these do not cause a response.)
  bool HasNewOutputs(const Sample& sample) const;
  inference::ModelInferResponse NewResponse(bool is_final) const;
  void AddVllmOutputs(inference::ModelInferResponse* response) const;
  // Adds the outputs of the samples [first, first + count) to the response.
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

// Returns a response without outputs that is marked as the last of the request
// with this id.
inference::ModelInferResponse EmptyFinalResponse(const std::string& model_name,
                                                 const std::string& id);

// The version of every model, as clients see it.
inline constexpr char kKserveModelVersion[] = "1";

}  // namespace kvasir::router
