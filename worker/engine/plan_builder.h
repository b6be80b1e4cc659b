// Writes the step plan from the scheduler's choices. StepPlan messages are
// reused, so that a step with the same batch as before allocates nothing.
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
  Sequence* sequence = nullptr;  // null if it ended while the step ran
  uint64_t sequence_id = 0;
  uint32_t start = 0;
  uint32_t num_tokens = 0;
  uint32_t num_targets = 0;
  bool prompt = false;  // all tokens belong to the prompt; else all are output
  bool samples = false;
  bool decodes = false;  // one token: the last of the sequence
  // Planned ahead: the input token is still being sampled, so it is not yet in
  // `sequence`.
  bool ahead = false;
};

// A step from its planning until its result is applied.
struct PlannedStep {
  kvasir::v1::StepPlan plan;
  std::vector<PlannedSequence> sequences;  // in the order of the plan
};

// Threads: the scheduler's thread.
class PlanBuilder {
 public:
  // Starts a new plan. Releases that no plan contains yet are kept.
  void Begin();
  // The next plan tells the executor to forget the sequence.
  void Release(uint64_t sequence_id) { released_.push_back(sequence_id); }
  void Add(const PlannedSequence& planned);
  bool empty() const { return prompts_.empty() && outputs_.empty(); }

  // Puts prompts before output, sets Sequence::plan_index, and takes block
  // table deltas, page copies and evictions from the cache. `masks` may be
  // null.
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
