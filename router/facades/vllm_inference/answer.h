// Builds one request's answer: engine events in, vllm.GenerateResponses out. No
// gRPC, no threads, no clock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"
#include "proto/vllm/inference.pb.h"
#include "router/facades/calls/answer_samples.h"
#include "router/facades/text/text_codec.h"
#include "router/facades/text/text_stream.h"
#include "router/facades/vllm_inference/request.h"

namespace kvasir::router {

// Clients check counts: each response has as many ids, log probabilities, ranks
// and candidates (if requested) as its num_tokens, and the finish's
// num_output_tokens is the sum. Every token counts, including the one that
// ended its sample. That token's text is left out, and text is cut before a
// stop string unless the client wants to keep it.
//
// Streamed: each response has new output of one sample, and the last one of a
// sample has its finish. Not streamed: one response, once the sample has ended.
//
// Threads: one at a time.
class VllmInferenceAnswer {
 public:
  using Response = vllm::GenerateResponse;

  // `codec` may be null if neither text nor stop strings are requested.
  VllmInferenceAnswer(VllmInferenceRequest request, proto::TokenBytes prompt,
                      std::vector<int32_t> eos_ids,
                      std::shared_ptr<const TextCodec> codec);

  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Ends every running sample as aborted.
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
    bool ended() const { return finish.has_value(); }
    bool has_output() const { return fresh.num_tokens() > 0; }

    // Null if there is no text.
    std::unique_ptr<TextStream> text;
    // A token whose text waits, because it may end the sample.
    std::optional<int32_t> maybe_last_id;
    uint32_t num_tokens = 0;
    // Absent while the sample runs.
    std::optional<vllm::FinishInfo> finish;
    // The output that came after the last response.
    vllm::SequenceOutput fresh;
  };

  void AddLogprob(int32_t id, const kvasir::v1::TokenLogprob& logprob,
                  vllm::SequenceOutput* fresh) const;
  void PushText(int32_t id, Sample* sample) const;
  void EndAtStopString(Sample* sample) const;
  void End(vllm::FinishInfo::FinishReason reason, Sample* sample) const;

  const VllmInferenceRequest request_;
  const proto::TokenBytes prompt_;
  const std::shared_ptr<const TextCodec> codec_;
  // Tokens that may end a sample.
  const EndingIds ending_ids_;
  AnswerSamples<Sample> samples_;
  bool owes_prompt_info_ = true;
};

// The size that one token may take in a response, its text estimated.
uint64_t VllmInferenceBytesPerToken(const VllmInferenceRequest& request);
// The size of the prompt's ids in a response.
uint64_t VllmInferencePromptBytes(const VllmInferenceRequest& request,
                                  uint64_t prompt_tokens);

}  // namespace kvasir::router
