#include "router/facades/vllm_inference/answer.h"

#include <algorithm>
#include <utility>

namespace kvasir::router {
namespace {

using vllm::FinishInfo;

// The most bytes that a message needs for a token id (a varint below 2^31), for
// a float, and for the tag and length of an inner message.
constexpr uint64_t kIdBytes = 5;
constexpr uint64_t kFloatBytes = 4;
constexpr uint64_t kMessageBytes = 4;
// An estimate of the bytes of a token's text. Most tokens have about four
// letters, and longer ones are rare.
constexpr uint64_t kTextBytes = 8;

FinishInfo::FinishReason ReasonOf(kvasir::v1::FinishReason reason) {
  switch (reason) {
    case kvasir::v1::FINISH_STOP:
      return FinishInfo::STOP;
    case kvasir::v1::FINISH_LENGTH:
      return FinishInfo::LENGTH;
    default:
      return FinishInfo::ABORTED;
  }
}

}  // namespace

VllmInferenceAnswer::VllmInferenceAnswer(VllmInferenceRequest request,
                                         proto::TokenBytes prompt,
                                         std::vector<int32_t> eos_ids,
                                         std::shared_ptr<const TextCodec> codec)
    : request_(std::move(request)),
      prompt_(std::move(prompt)),
      codec_(std::move(codec)),
      ending_ids_(request_.sampling, eos_ids),
      samples_(request_.sampling.n(), request_.streaming) {
  if (codec_ == nullptr) return;
  const std::vector<int32_t> prompt_ids = prompt_.ToIds();
  for (Sample& sample : samples_) {
    sample.text = NewTextStream(*codec_, prompt_ids, request_,
                                request_.include_stop_string);
  }
}

void VllmInferenceAnswer::OnTokens(
    const kvasir::v1::GenerateEvent::Tokens& tokens) {
  if (tokens.index() >= samples_.size()) return;
  Sample& sample = samples_[tokens.index()];
  for (int i = 0; i < tokens.token_ids_size(); ++i) {
    // Another token follows, so the token that was held back did not end the
    // sample. Output its text.
    if (sample.maybe_last_id) {
      PushText(*std::exchange(sample.maybe_last_id, std::nullopt), &sample);
    }
    if (sample.finish) return;
    const int32_t id = tokens.token_ids(i);
    ++sample.num_tokens;
    sample.fresh.set_num_tokens(sample.fresh.num_tokens() + 1);
    if (request_.wants_ids) {
      sample.fresh.add_token_ids(static_cast<uint32_t>(id));
    }
    if (request_.wants_logprobs && i < tokens.logprobs_size()) {
      AddLogprob(id, tokens.logprobs(i), &sample.fresh);
    }
    if (ending_ids_.Contain(id)) {
      sample.maybe_last_id = id;
    } else {
      PushText(id, &sample);
    }
  }
}

// Adds a token's log probability, rank and candidates. The rank is 0 if the
// engine has not reported the token among the most likely ones.
void VllmInferenceAnswer::AddLogprob(int32_t id,
                                     const kvasir::v1::TokenLogprob& logprob,
                                     vllm::SequenceOutput* fresh) const {
  fresh->add_logprobs(logprob.logprob());
  // Add an entry even if it is empty, because some clients end the call if the
  // three lists differ in length.
  auto* const candidates = fresh->add_candidate_tokens();
  uint32_t rank = 0;
  for (int i = 0; i < logprob.top_size(); ++i) {
    const auto& top = logprob.top(i);
    const auto place = static_cast<uint32_t>(i + 1);
    if (top.token_id() == id) {
      rank = place;
    } else {
      auto* candidate = candidates->add_tokens();
      candidate->set_id(static_cast<uint32_t>(top.token_id()));
      candidate->set_logprob(top.logprob());
      candidate->set_rank(place);
    }
  }
  fresh->add_ranks(rank);
}

void VllmInferenceAnswer::PushText(int32_t id, Sample* sample) const {
  if (sample->text == nullptr) return;
  const std::string text = sample->text->Push({&id, 1}).text;
  if (request_.wants_text) sample->fresh.mutable_text()->append(text);
  EndAtStopString(sample);
}

void VllmInferenceAnswer::EndAtStopString(Sample* sample) const {
  if (!sample->text->stopped()) return;
  End(FinishInfo::STOP, sample);
  sample->finish->set_stop_string(sample->text->matched_stop());
}

void VllmInferenceAnswer::End(FinishInfo::FinishReason reason,
                              Sample* sample) const {
  sample->finish.emplace();
  sample->finish->set_finish_reason(reason);
  sample->finish->set_num_output_tokens(sample->num_tokens);
}

void VllmInferenceAnswer::OnFinish(
    const kvasir::v1::GenerateEvent::Finish& finish) {
  if (finish.index() >= samples_.size()) return;
  Sample& sample = samples_[finish.index()];
  if (sample.finish) return;
  if (sample.maybe_last_id) {
    const int32_t id = *std::exchange(sample.maybe_last_id, std::nullopt);
    // If the output was shorter than min_new_tokens, this token did not end the
    // sample. Its text is then output like any other.
    const bool ended = finish.reason() == kvasir::v1::FINISH_STOP;
    if (!ended || request_.include_stop_string) PushText(id, &sample);
    if (sample.finish) return;
  }
  if (sample.text != nullptr) {
    const std::string text = sample.text->Finish();
    if (request_.wants_text) sample.fresh.mutable_text()->append(text);
    EndAtStopString(&sample);
    if (sample.finish) return;
  }
  End(ReasonOf(finish.reason()), &sample);
  if (!finish.has_matched_token_id()) return;
  const int32_t matched = finish.matched_token_id();
  if (IsStopId(request_.sampling, matched)) {
    sample.finish->set_stop_token_id(static_cast<uint32_t>(matched));
  } else {
    sample.finish->set_eos_token_id(static_cast<uint32_t>(matched));
  }
}

void VllmInferenceAnswer::Stop() {
  for (Sample& sample : samples_) {
    if (!sample.finish) End(FinishInfo::ABORTED, &sample);
  }
}

VllmInferenceAnswer::Response VllmInferenceAnswer::Take() {
  const uint32_t index = samples_.Next();
  Sample& sample = samples_[index];
  Response response;
  if (std::exchange(owes_prompt_info_, false)) {
    vllm::PromptInfo* info = response.mutable_prompt_info();
    info->set_num_prompt_tokens(static_cast<uint32_t>(prompt_.size_tokens()));
    for (size_t i = 0; request_.wants_prompt_ids && i < prompt_.size_tokens();
         ++i) {
      info->add_token_ids(static_cast<uint32_t>(prompt_[i]));
    }
  }
  vllm::SequenceOutput* outputs = response.mutable_outputs();
  outputs->Swap(&sample.fresh);
  sample.fresh.Clear();
  outputs->set_index(index);
  if (sample.finish) {
    *outputs->mutable_finish_info() = *sample.finish;
    samples_.Complete(index);
  }
  return response;
}

size_t VllmInferenceAnswer::waiting_bytes() const {
  if (!request_.streaming) return 0;
  size_t bytes = 0;
  const auto per_token =
      static_cast<size_t>(VllmInferenceBytesPerToken(request_));
  for (const Sample& sample : samples_) {
    bytes += sample.fresh.text().size() + sample.fresh.num_tokens() * per_token;
  }
  return bytes;
}

uint64_t VllmInferenceBytesPerToken(const VllmInferenceRequest& request) {
  uint64_t bytes = 0;
  if (request.wants_text) bytes += kTextBytes;
  if (request.wants_ids) bytes += kIdBytes;
  if (request.wants_logprobs) {
    bytes += kFloatBytes + kIdBytes;
    bytes += kMessageBytes + request.num_candidates *
                                 (kMessageBytes + 2 * kIdBytes + kFloatBytes);
  }
  return std::max<uint64_t>(1, bytes);
}

uint64_t VllmInferencePromptBytes(const VllmInferenceRequest& request,
                                  uint64_t prompt_tokens) {
  return request.wants_prompt_ids ? kIdBytes * prompt_tokens : 0;
}

}  // namespace kvasir::router
