// Builds one request's answer: engine events in, GenerateResponses out. No
// gRPC, no threads, no clock.
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

// Every token is sent, including the one that ended its sample: clients strip
// it, and count it. A stop string ends a sample with the token that completes
// it.
//
// Streamed: chunks of new output, each of one sample, and after a sample's last
// chunk its `complete`, which has counts and reason but no tokens. Not
// streamed: one `complete` with everything for each sample, once all have
// ended, so that the request can fail as a whole before.
//
// Threads: one at a time.
class VllmEngineAnswer {
 public:
  using Response = vllm::grpc::engine::GenerateResponse;

  // `codec` may be null if there are no stop strings.
  VllmEngineAnswer(VllmEngineRequest request, proto::TokenBytes prompt,
                   std::shared_ptr<const TextCodec> codec);

  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Ends every running sample with reason "abort".
  void Stop();

  bool finished() const { return samples_.ended(); }
  bool HasResponse() const { return samples_.HasResponse(); }
  // Serves samples in turn. Precondition: HasResponse().
  Response Take();
  bool complete() const { return samples_.complete(); }
  // Only for streamed answers; otherwise 0.
  size_t waiting_bytes() const;

 private:
  struct Sample {
    bool ended() const { return !finish_reason.empty(); }
    bool has_output() const { return !new_ids.empty(); }

    // Null if there are no stop strings.
    std::unique_ptr<TextStream> text;
    // Empty while the sample runs.
    std::string finish_reason;
    std::optional<int32_t> matched_id;
    std::string matched_string;
    uint32_t num_tokens = 0;
    uint32_t cached_tokens = 0;
    // The output that came after the last response.
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
  // Sent with the first response of sample 0.
  std::vector<float> prompt_logprobs_;
  bool owes_prompt_logprobs_ = false;
};

// The size of one token in a response: its id and log probabilities.
uint64_t VllmEngineBytesPerToken(const kvasir::v1::SamplingParams& sampling);
// The size of the prompt's log probabilities in a response.
uint64_t VllmEnginePromptBytes(const kvasir::v1::SamplingParams& sampling,
                               uint64_t prompt_tokens);

}  // namespace kvasir::router
