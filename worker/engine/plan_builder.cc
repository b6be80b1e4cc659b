#include "worker/engine/plan_builder.h"

#include "absl/types/span.h"

namespace kvasir::worker {
namespace {

using kvasir::v1::SampleRequest;
using kvasir::v1::SequenceStep;

void AddIds(absl::Span<const int32_t> ids,
            google::protobuf::RepeatedField<int32_t>* out) {
  out->Add(ids.begin(), ids.end());
}

// Sets every field of `out`, which may still have the values of an earlier
// step.
void WriteSample(const PlannedSequence& planned, TokenMaskProvider* masks,
                 SampleRequest* out) {
  Sequence& sequence = *planned.sequence;
  const RequestState& state = *sequence.request;
  const kvasir::v1::SamplingParams& p = state.request.sampling;
  out->set_temperature(p.temperature());
  out->set_top_k(p.top_k());
  out->set_top_p(p.top_p());
  out->set_min_p(p.min_p());
  out->set_repetition_penalty(p.repetition_penalty());
  out->set_presence_penalty(p.presence_penalty());
  out->set_frequency_penalty(p.frequency_penalty());
  out->set_seed(p.seed());
  out->set_sample_index(sequence.sample_index);
  const uint32_t end = planned.start + planned.num_tokens;
  out->set_position(end);
  out->set_num_logprobs(p.has_logprobs() ? static_cast<int32_t>(p.logprobs())
                                         : -1);

  out->mutable_logit_bias()->Clear();
  for (const auto& [id, bias] : state.logit_bias) {
    auto* entry = out->add_logit_bias();
    entry->set_token_id(id);
    entry->set_bias(bias);
  }
  out->mutable_banned_ids()->Clear();
  if (end - state.prompt_tokens() < p.min_tokens()) {
    AddIds(state.stop_ids, out->mutable_banned_ids());
  }
  if (!p.token_mask().empty() && masks != nullptr) {
    const auto output =
        absl::MakeConstSpan(sequence.tokens).subspan(state.prompt_tokens());
    *out->mutable_token_mask() =
        masks->NextMask({.mask = p.token_mask(),
                         .sample_index = sequence.sample_index,
                         .output_ids = output});
  } else if (!out->token_mask().empty()) {
    out->clear_token_mask();
  }
  out->mutable_prompt_history()->Clear();
  out->mutable_output_history()->Clear();
  out->set_history_reset(!sequence.history_sent);
  if (!sequence.history_sent && state.has_penalties) {
    const auto tokens = absl::MakeConstSpan(sequence.tokens);
    AddIds(tokens.first(state.prompt_tokens()), out->mutable_prompt_history());
    AddIds(tokens.subspan(state.prompt_tokens()),
           out->mutable_output_history());
  }
  sequence.history_sent = true;
}

}  // namespace

void PlanBuilder::Begin() {
  prompts_.clear();
  outputs_.clear();
}

void PlanBuilder::Add(const PlannedSequence& planned) {
  (planned.prompt ? prompts_ : outputs_).push_back(planned);
}

void PlanBuilder::Build(uint64_t step_id, cache::KvCache* cache,
                        TokenMaskProvider* masks, PlannedStep* out) {
  out->sequences = prompts_;
  out->sequences.insert(out->sequences.end(), outputs_.begin(), outputs_.end());

  kvasir::v1::StepPlan& plan = out->plan;
  plan.set_step_id(step_id);
  plan.mutable_released_sequences()->Clear();
  plan.mutable_released_sequences()->Add(released_.begin(), released_.end());
  released_.clear();
  plan.mutable_page_copies()->Clear();
  plan.mutable_evictions()->Clear();
  cache->TakePageCopies(plan.mutable_page_copies());
  cache->TakeEvictions(plan.mutable_evictions());

  const auto count = static_cast<int>(out->sequences.size());
  while (plan.sequences_size() > count) {
    plan.mutable_sequences()->RemoveLast();
  }
  while (plan.sequences_size() < count) plan.add_sequences();
  for (int i = 0; i < count; ++i) {
    const PlannedSequence& planned = out->sequences[static_cast<size_t>(i)];
    planned.sequence->plan_index[step_id % kMostPlannedSteps] = i;
    Write(planned, step_id, cache, masks, plan.mutable_sequences(i));
  }
}

void PlanBuilder::Write(const PlannedSequence& planned, uint64_t step_id,
                        cache::KvCache* cache, TokenMaskProvider* masks,
                        SequenceStep* out) {
  Sequence& sequence = *planned.sequence;
  const auto tokens = absl::MakeConstSpan(sequence.tokens);
  sequence.known_to_executor = true;
  out->set_sequence_id(planned.sequence_id);
  out->mutable_block_tables()->Clear();
  out->mutable_physical_starts()->Clear();
  out->mutable_first_counted()->Clear();
  cache->TakeDeltas(sequence.cache_id(), out,
                    int64_t{planned.start} - sequence.computed);

  // The executor keeps a sampled token only for the next step. If the sequence
  // missed a step because pages ran out, the plan must contain the token.
  const bool last_sampled =
      planned.ahead || (planned.decodes && sequence.sampled_step != 0 &&
                        sequence.sampled_step + 1 == step_id);
  out->mutable_token_ids()->Clear();
  out->set_input_is_last_sampled(last_sampled);
  out->set_num_tokens(planned.num_tokens);
  if (!last_sampled) {
    AddIds(tokens.subspan(planned.start, planned.num_tokens),
           out->mutable_token_ids());
  }
  out->set_logical_start(planned.start);
  out->set_prompt(planned.prompt);

  out->mutable_target_ids()->Clear();
  if (planned.num_targets > 0) {
    AddIds(tokens.subspan(planned.start + 1, planned.num_targets),
           out->mutable_target_ids());
  }
  if (planned.samples) {
    WriteSample(planned, masks, out->mutable_sample());
  } else {
    out->clear_sample();
  }
}

}  // namespace kvasir::worker
