#include "router/facades/vllm_engine/answer.h"

#include <algorithm>
#include <utility>

#include "router/facades/calls/backend.h"

namespace kvasir::router {
namespace {

using vllm::grpc::engine::GenerateComplete;
using vllm::grpc::engine::GenerateStreamChunk;
using vllm::grpc::engine::InputLogProbs;

// The most bytes that a message needs for a token id (a varint below 2^31), for
// a float, and for the tags and length of an inner message.
constexpr uint64_t kIdBytes = 5;
constexpr uint64_t kFloatBytes = 4;
constexpr uint64_t kMessageBytes = 8;

}  // namespace

VllmEngineAnswer::VllmEngineAnswer(VllmEngineRequest request,
                                   proto::TokenBytes prompt,
                                   std::shared_ptr<const TextCodec> codec)
    : request_(std::move(request)),
      prompt_(std::move(prompt)),
      codec_(std::move(codec)),
      samples_(request_.sampling.n(), request_.streaming),
      owes_prompt_logprobs_(request_.sampling.has_prompt_logprobs()) {
  if (request_.stop_strings.empty()) return;
  const std::vector<int32_t> prompt_ids = prompt_.ToIds();
  for (Sample& sample : samples_) {
    sample.text = NewTextStream(*codec_, prompt_ids, request_,
                                /*include_stop_string=*/false);
  }
}

void VllmEngineAnswer::OnTokens(
    const kvasir::v1::GenerateEvent::Tokens& tokens) {
  if (tokens.index() >= samples_.size()) return;
  for (const kvasir::v1::TokenLogprob& logprob : tokens.prompt_logprobs()) {
    prompt_logprobs_.push_back(logprob.logprob());
  }
  Sample& sample = samples_[tokens.index()];
  for (int i = 0; i < tokens.token_ids_size(); ++i) {
    if (sample.ended()) return;
    const int32_t id = tokens.token_ids(i);
    ++sample.num_tokens;
    sample.new_ids.push_back(id);
    if (request_.sampling.has_logprobs() && i < tokens.logprobs_size()) {
      AddLogprob(id, tokens.logprobs(i), &sample);
    }
    if (sample.text == nullptr) continue;
    sample.text->Push({&id, 1});
    EndAtStopString(&sample);
  }
}

void VllmEngineAnswer::AddLogprob(int32_t id,
                                  const kvasir::v1::TokenLogprob& logprob,
                                  Sample* sample) const {
  auto& lists = sample->new_logprobs;
  lists.add_token_logprobs(logprob.logprob());
  lists.add_token_ids(static_cast<uint32_t>(id));
  if (request_.sampling.logprobs() == 0) return;
  auto* top = lists.add_top_logprobs();
  for (const auto& candidate : logprob.top()) {
    top->add_values(candidate.logprob());
    top->add_token_ids(static_cast<uint32_t>(candidate.token_id()));
  }
}

void VllmEngineAnswer::EndAtStopString(Sample* sample) const {
  if (!sample->text->stopped()) return;
  sample->finish_reason = "stop";
  sample->matched_string = sample->text->matched_stop();
}

void VllmEngineAnswer::OnFinish(
    const kvasir::v1::GenerateEvent::Finish& finish) {
  if (finish.index() >= samples_.size()) return;
  Sample& sample = samples_[finish.index()];
  sample.cached_tokens = finish.cached_tokens();
  if (sample.ended()) return;
  if (sample.text != nullptr) {
    sample.text->Finish();
    EndAtStopString(&sample);
    if (sample.ended()) return;
  }
  sample.finish_reason = FinishReasonText(finish.reason());
  // Report the matched token only if it is one of the client's stop ids, not if
  // it is the model's own end token.
  if (finish.has_matched_token_id() &&
      IsStopId(request_.sampling, finish.matched_token_id())) {
    sample.matched_id = finish.matched_token_id();
  }
}

void VllmEngineAnswer::Stop() {
  for (Sample& sample : samples_) {
    if (!sample.ended()) sample.finish_reason = "abort";
  }
}

VllmEngineAnswer::Response VllmEngineAnswer::Take() {
  const uint32_t index = samples_.Next();
  Response response;
  if (request_.streaming && samples_[index].has_output()) {
    TakeChunk(index, response.mutable_chunk());
  } else {
    TakeComplete(index, response.mutable_complete());
  }
  return response;
}

InputLogProbs VllmEngineAnswer::PromptLogprobs() const {
  InputLogProbs lists;
  const size_t count =
      std::min(prompt_.size_tokens(), prompt_logprobs_.size() + 1);
  for (size_t i = 0; i < count; ++i) {
    auto* logprob = lists.add_token_logprobs();
    // The prompt's first token has no log probability, because no token
    // precedes it.
    if (i > 0) logprob->set_value(prompt_logprobs_[i - 1]);
    lists.add_token_ids(static_cast<uint32_t>(prompt_[i]));
  }
  return lists;
}

void VllmEngineAnswer::TakeChunk(uint32_t index, GenerateStreamChunk* chunk) {
  Sample& sample = samples_[index];
  chunk->set_index(index);
  chunk->set_prompt_tokens(static_cast<uint32_t>(prompt_.size_tokens()));
  // Here completion_tokens is the number of tokens in this chunk, not in the
  // whole sample.
  chunk->set_completion_tokens(static_cast<uint32_t>(sample.new_ids.size()));
  chunk->mutable_token_ids()->Add(sample.new_ids.begin(), sample.new_ids.end());
  if (request_.sampling.has_logprobs()) {
    chunk->mutable_output_logprobs()->Swap(&sample.new_logprobs);
  }
  if (index == 0 && std::exchange(owes_prompt_logprobs_, false)) {
    *chunk->mutable_input_logprobs() = PromptLogprobs();
  }
  sample.new_ids.clear();
  sample.new_logprobs.Clear();
}

void VllmEngineAnswer::TakeComplete(uint32_t index,
                                    GenerateComplete* complete) {
  Sample& sample = samples_[index];
  complete->set_index(index);
  complete->set_finish_reason(sample.finish_reason);
  complete->set_prompt_tokens(static_cast<uint32_t>(prompt_.size_tokens()));
  complete->set_completion_tokens(sample.num_tokens);
  complete->set_cached_tokens(sample.cached_tokens);
  if (sample.matched_id) {
    complete->set_matched_token_id(static_cast<uint32_t>(*sample.matched_id));
  }
  if (!sample.matched_string.empty()) {
    complete->set_matched_stop_str(sample.matched_string);
  }
  complete->mutable_output_ids()->Add(sample.new_ids.begin(),
                                      sample.new_ids.end());
  if (!request_.streaming && request_.sampling.has_logprobs()) {
    complete->mutable_output_logprobs()->Swap(&sample.new_logprobs);
  }
  if (index == 0 && std::exchange(owes_prompt_logprobs_, false)) {
    *complete->mutable_input_logprobs() = PromptLogprobs();
  }
  sample.new_ids.clear();
  samples_.Complete(index);
}

size_t VllmEngineAnswer::waiting_bytes() const {
  if (!request_.streaming) return 0;
  size_t tokens = 0;
  for (const Sample& sample : samples_) tokens += sample.new_ids.size();
  return tokens *
         static_cast<size_t>(VllmEngineBytesPerToken(request_.sampling));
}

uint64_t VllmEngineBytesPerToken(const kvasir::v1::SamplingParams& sampling) {
  if (!sampling.has_logprobs()) return kIdBytes;
  const uint64_t own = kIdBytes + kIdBytes + kFloatBytes;
  if (sampling.logprobs() == 0) return own;
  return own + 2 * kMessageBytes +
         sampling.logprobs() * uint64_t{kIdBytes + kFloatBytes};
}

uint64_t VllmEnginePromptBytes(const kvasir::v1::SamplingParams& sampling,
                               uint64_t prompt_tokens) {
  if (!sampling.has_prompt_logprobs()) return 0;
  return prompt_tokens * (kIdBytes + kFloatBytes + kMessageBytes);
}

}  // namespace kvasir::router
