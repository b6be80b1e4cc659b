#include "worker/testing/recording_sink.h"

#include "base/check.h"

namespace kvasir::worker {

void RecordingSink::OnAccepted(uint32_t prompt_tokens) {
  KVASIR_CHECK(!accepted_ && !ended());
  accepted_ = true;
  prompt_tokens_ = prompt_tokens;
}

void RecordingSink::OnTokens(const TokenChunk& chunk) {
  KVASIR_CHECK(accepted_ && !ended());
  Sample& sample = samples_.at(chunk.index);
  KVASIR_CHECK(!sample.finish.has_value());
  sample.tokens.insert(sample.tokens.end(), chunk.token_ids.begin(),
                       chunk.token_ids.end());
  sample.logprobs.insert(sample.logprobs.end(), chunk.logprobs.begin(),
                         chunk.logprobs.end());
  sample.prompt_logprobs.insert(sample.prompt_logprobs.end(),
                                chunk.prompt_logprobs.begin(),
                                chunk.prompt_logprobs.end());
}

void RecordingSink::OnFinished(const FinishInfo& info) {
  KVASIR_CHECK(accepted_ && !ended());
  Sample& sample = samples_.at(info.index);
  KVASIR_CHECK(!sample.finish.has_value());
  sample.finish = info;
  ++finished_;
  KVASIR_CHECK(info.last == (finished_ == samples_.size()));
}

void RecordingSink::OnFailed(const Refusal& why) {
  KVASIR_CHECK(accepted_ && !ended());
  failed_ = why;
}

}  // namespace kvasir::worker
