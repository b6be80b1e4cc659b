// Sinks for tests: they remember what they heard and check the order of it.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "base/check.h"
#include "worker/engine/engine_events.h"

namespace kvasir::worker {

// Threads: that of the caller of the sink; read when nothing runs.
class RecordingSink : public EngineSink {
 public:
  struct Sample {
    std::vector<int32_t> tokens;
    std::vector<TokenLogprob> logprobs;
    std::vector<float> prompt_logprobs;
    std::optional<FinishInfo> finish;
  };

  explicit RecordingSink(uint32_t n = 1) : samples_(n) {}

  void OnAccepted(uint32_t prompt_tokens) override {
    KVASIR_CHECK(!accepted_ && !ended());
    accepted_ = true;
    prompt_tokens_ = prompt_tokens;
  }
  void OnTokens(const TokenChunk& chunk) override {
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
  void OnFinished(const FinishInfo& info) override {
    KVASIR_CHECK(accepted_ && !ended());
    Sample& sample = samples_.at(info.index);
    KVASIR_CHECK(!sample.finish.has_value());
    sample.finish = info;
    ++finished_;
    KVASIR_CHECK(info.last == (finished_ == samples_.size()));
  }
  void OnFailed(const Refusal& why) override {
    KVASIR_CHECK(accepted_ && !ended());
    failed_ = why;
  }

  bool accepted() const { return accepted_; }
  uint32_t prompt_tokens() const { return prompt_tokens_; }
  const std::vector<Sample>& samples() const { return samples_; }
  const std::optional<Refusal>& failed() const { return failed_; }
  bool ended() const {
    return failed_.has_value() || finished_ == samples_.size();
  }

 private:
  bool accepted_ = false;
  uint32_t prompt_tokens_ = 0;
  std::vector<Sample> samples_;
  size_t finished_ = 0;
  std::optional<Refusal> failed_;
};

}  // namespace kvasir::worker
