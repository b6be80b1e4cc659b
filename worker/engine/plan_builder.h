// Writes the StepPlan of the sequences that the scheduler chose. StepPlan
// messages are reused, so that a step with the same batch as before allocates
// no memory.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "cache/kv_cache.h"
#include "proto/kvasir/v1/step_plan.pb.h"
#include "worker/engine/sequence.h"
#include "worker/engine/token_mask.h"

namespace kvasir::worker {

// One sequence's part of a step. The step runs the sequence's tokens [start,
// start + num_tokens).
struct PlannedSequence {
  Sequence* sequence = nullptr;  // null after the sequence has ended
  uint64_t sequence_id = 0;
  uint32_t start = 0;
  uint32_t num_tokens = 0;
  uint32_t num_targets = 0;
  // true: the tokens are from the prompt; false: from the output
  bool prompt = false;
  bool samples = false;
  bool decodes = false;  // true if only the sequence's last token is run
  // True if the sequence's input token was still being sampled when this step
  // was planned. `sequence` does not have the token yet.
  bool ahead = false;
};

// A step that is planned and whose result is not yet applied.
struct PlannedStep {
  kvasir::v1::StepPlan plan;
  std::vector<PlannedSequence> sequences;  // in the order of the plan
};

// Threads: only the scheduler's thread may use it.
class PlanBuilder {
 public:
  void Begin();
  // Makes the next plan tell the executor to forget the sequence.
  void Release(uint64_t sequence_id) { released_.push_back(sequence_id); }
  void Add(const PlannedSequence& planned);
  bool empty() const { return prompts_.empty() && outputs_.empty(); }

  // Writes the plan: prompt chunks before decodes, and the block table deltas,
  // page copies and evictions that the cache has collected. Sets
  // Sequence::plan_index. `masks` may be null.
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
