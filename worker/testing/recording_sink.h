// A sink for tests that records its calls and checks their order.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "worker/engine/engine_events.h"

namespace kvasir::worker {

// Threads: not thread-safe. One thread makes the calls; read the recorded calls
// only while nothing runs.
class RecordingSink : public EngineSink {
 public:
  struct Sample {
    std::vector<int32_t> tokens;
    std::vector<kvasir::v1::TokenLogprob> logprobs;
    std::vector<float> prompt_logprobs;
    std::optional<kvasir::v1::GenerateEvent::Finish> finish;
  };

  explicit RecordingSink(uint32_t n = 1) : samples_(n) {}

  void OnAccepted(uint32_t prompt_tokens) override;
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens& chunk) override;
  void OnFinished(const kvasir::v1::GenerateEvent::Finish& finish,
                  bool last) override;
  void OnFailed(const Refusal& why) override;

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
