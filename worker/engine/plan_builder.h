// Writes the step plan from what the scheduler chose. StepPlans are reused from
// step to step: with the same batch nothing is allocated.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cache/kv_cache.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/engine/sequence.h"
#include "worker/engine/token_mask.h"

namespace kvasir::worker {

// A sequence's part of a step: tokens [start, start + num_tokens).
struct PlannedSequence {
  Sequence* sequence = nullptr;  // null: it ended while the step ran
  uint64_t sequence_id = 0;
  uint32_t start = 0;
  uint32_t num_tokens = 0;
  uint32_t num_targets = 0;
  bool prompt = false;  // the tokens are all of the prompt; else all are output
  bool samples = false;
  bool decodes = false;  // one token, the last
  // Of a step planned before its token, which the step that runs samples, is
  // known: none of `sequence`'s yet.
  bool ahead = false;
};

// A step until its result is taken over.
struct PlannedStep {
  kvasir::v1::StepPlan plan;
  std::vector<PlannedSequence> sequences;  // in the plan's order
};

// Threads: the scheduler's.
class PlanBuilder {
 public:
  // Starts a new plan; releases that no plan has carried yet stay.
  void Begin();
  // The executor forgets the sequence before the next step that is built.
  void Release(uint64_t sequence_id) { released_.push_back(sequence_id); }
  void Add(const PlannedSequence& planned);
  bool empty() const { return prompts_.empty() && outputs_.empty(); }

  // Puts prompts before output, sets Sequence::plan_index, and takes deltas
  // and copies from the cache. `masks` may be null.
  void Build(uint64_t step_id, cache::KvCache* cache, TokenMaskProvider* masks,
             PlannedStep* out);

 private:
  void Write(const PlannedSequence& planned, uint64_t step_id,
             cache::KvCache* cache, TokenMaskProvider* masks,
             kvasir::v1::SequenceStep* out);

  std::vector<uint64_t> released_;
  std::vector<PlannedSequence> prompts_;
  std::vector<PlannedSequence> outputs_;
};

}  // namespace kvasir::worker
