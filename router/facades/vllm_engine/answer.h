// Builds the answer to one request from the engine's events, as a sequence of
// GenerateResponses. Uses no gRPC, threads or clock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"
#include "proto/vllm/engine.pb.h"
#include "router/facades/calls/answer_samples.h"
#include "router/facades/text/text_codec.h"
#include "router/facades/text/text_stream.h"
#include "router/facades/vllm_engine/request.h"

namespace kvasir::router {

// The answer to one request. Every token is sent, including the one that ended
// its sample, because clients count this token and remove it from the text
// themselves. If a stop string ends a sample, the token that completes the
// string is the last one. A streamed answer has chunks, each with the new
// output of one sample. After its last chunk comes the sample's `complete`,
// which has counts and the finish reason but no tokens. An answer that is not
// streamed has one `complete` for each sample, with its whole output. They come
// after all samples have ended.
//
// Threads: only one thread at a time may use it.
class VllmEngineAnswer {
 public:
  using Response = vllm::grpc::engine::GenerateResponse;

  // `codec` may be null if the request has no stop strings.
  VllmEngineAnswer(VllmEngineRequest request, proto::TokenBytes prompt,
                   std::shared_ptr<const TextCodec> codec);

  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Ends every running sample with reason "abort".
  void Stop();

  bool finished() const { return samples_.ended(); }
  bool HasResponse() const { return samples_.HasResponse(); }
  // Returns the next response. The samples take turns.
  // Precondition: HasResponse().
  Response Take();
  bool complete() const { return samples_.complete(); }
  // Returns how many bytes of output Take could return now; always 0 if the
  // answer is not streamed.
  size_t waiting_bytes() const;

 private:
  struct Sample {
    bool ended() const { return !finish_reason.empty(); }
    bool has_output() const { return !new_ids.empty(); }

    // Finds stop strings; null if the request has none.
    std::unique_ptr<TextStream> text;
    // Empty while the sample runs.
    std::string finish_reason;
    std::optional<int32_t> matched_id;
    std::string matched_string;
    uint32_t num_tokens = 0;
    uint32_t cached_tokens = 0;
    // The output since the sample's last response.
    std::vector<int32_t> new_ids;
    vllm::grpc::engine::OutputLogProbs new_logprobs;
  };

  void AddLogprob(int32_t id, const kvasir::v1::TokenLogprob& logprob,
                  Sample* sample) const;
  void EndAtStopString(Sample* sample) const;
  vllm::grpc::engine::InputLogProbs PromptLogprobs() const;
  void TakeChunk(uint32_t index,
                 vllm::grpc::engine::GenerateStreamChunk* chunk);
  void TakeComplete(uint32_t index,
                    vllm::grpc::engine::GenerateComplete* complete);

  const VllmEngineRequest request_;
  const proto::TokenBytes prompt_;
  const std::shared_ptr<const TextCodec> codec_;
  AnswerSamples<Sample> samples_;
  // The log probabilities of the prompt. The first response of sample 0
  // contains them.
  std::vector<float> prompt_logprobs_;
  bool owes_prompt_logprobs_ = false;
};

// Returns the most bytes that a token can take in a response, with its id and
// log probabilities.
uint64_t VllmEngineBytesPerToken(const kvasir::v1::SamplingParams& sampling);
// Returns the most bytes that the prompt's log probabilities can take in
// a response.
uint64_t VllmEnginePromptBytes(const kvasir::v1::SamplingParams& sampling,
                               uint64_t prompt_tokens);

}  // namespace kvasir::router
