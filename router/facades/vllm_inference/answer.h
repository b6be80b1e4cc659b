// Builds the answer to one request from the engine's events, as a sequence of
// vllm.GenerateResponses. Uses no gRPC, threads or clock.
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

// The answer to one request. Every token counts, including the one that ended
// its sample. But the text does not contain that token or a stop string, unless
// the client wants to keep them. Clients check the counts: each requested list
// of a response must have num_tokens entries, and num_output_tokens of the
// finish must be the sum of all num_tokens. In a streamed answer, each response
// has new output of one sample, and the last response of a sample has its
// finish. An answer that is not streamed is a single response after the end of
// the sample.
//
// Threads: only one thread at a time may use it.
class VllmInferenceAnswer {
 public:
  using Response = vllm::GenerateResponse;

  // `codec` may be null if the client requests no text and no stop strings.
  VllmInferenceAnswer(VllmInferenceRequest request, proto::TokenBytes prompt,
                      std::vector<int32_t> eos_ids,
                      std::shared_ptr<const TextCodec> codec);

  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens);
  void OnFinish(const kvasir::v1::GenerateEvent::Finish& finish);
  // Ends every running sample as aborted.
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
    bool ended() const { return finish.has_value(); }
    bool has_output() const { return fresh.num_tokens() > 0; }

    // The sample's text; null if there is no codec.
    std::unique_ptr<TextStream> text;
    // The sample's newest token, if it may have ended the sample. Its text is
    // held back until the next event shows whether it did.
    std::optional<int32_t> maybe_last_id;
    uint32_t num_tokens = 0;
    // Absent while the sample runs.
    std::optional<vllm::FinishInfo> finish;
    // The output since the sample's last response.
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
  // The tokens that may end a sample.
  const EndingIds ending_ids_;
  AnswerSamples<Sample> samples_;
  bool owes_prompt_info_ = true;
};

// Returns how many bytes one token may take in a response. For its text, this
// is an estimate.
uint64_t VllmInferenceBytesPerToken(const VllmInferenceRequest& request);
// Returns the most bytes that the prompt's ids can take in a response.
uint64_t VllmInferencePromptBytes(const VllmInferenceRequest& request,
                                  uint64_t prompt_tokens);

}  // namespace kvasir::router
