#include "worker/testing/recording_sink.h"

#include "base/check.h"

namespace kvasir::worker {

void RecordingSink::OnAccepted(uint32_t prompt_tokens) {
  KVASIR_CHECK(!accepted_ && !ended());
  accepted_ = true;
  prompt_tokens_ = prompt_tokens;
}

void RecordingSink::OnTokens(const kvasir::v1::GenerateEvent::Tokens& chunk) {
  KVASIR_CHECK(accepted_ && !ended());
  Sample& sample = samples_.at(chunk.index());
  KVASIR_CHECK(!sample.finish.has_value());
  sample.tokens.insert(sample.tokens.end(), chunk.token_ids().begin(),
                       chunk.token_ids().end());
  sample.logprobs.insert(sample.logprobs.end(), chunk.logprobs().begin(),
                         chunk.logprobs().end());
  for (const auto& logprob : chunk.prompt_logprobs()) {
    sample.prompt_logprobs.push_back(logprob.logprob());
  }
}

void RecordingSink::OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                               bool last) {
  KVASIR_CHECK(accepted_ && !ended());
  Sample& sample = samples_.at(finish.index());
  KVASIR_CHECK(!sample.finish.has_value());
  sample.finish = finish;
  ++finished_;
  KVASIR_CHECK(last == (finished_ == samples_.size()));
}

void RecordingSink::OnFailed(const Refusal& why) {
  KVASIR_CHECK(accepted_ && !ended());
  failed_ = why;
}

}  // namespace kvasir::worker
