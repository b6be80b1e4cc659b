#include "bench/capacity.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/status_macros.h"
#include "cache/kv_cache.h"
#include "cache/layout/layout.h"
#include "kernels/device/allocator.h"
#include "worker/engine/scheduler.h"
#include "worker/executor/pages/kv_arenas.h"
#include "worker/program/served_plan.h"
#include "worker/ranks/rank.h"

namespace kvasir::worker {
namespace {

// The most tokens that all sequences may have together. They are limited
// because one step contains all prompts.
constexpr int64_t kMaxTokens = int64_t{1} << 28;

class NullSink final : public EngineSink {
 public:
  void OnAccepted(uint32_t) override {}
  void OnTokens(const kvasir::v1::GenerateEvent::Tokens&) override {}
  void OnFinished(const kvasir::v1::GenerateEvent::Finish&, bool) override {}
  void OnFailed(const Refusal&) override {}
};

int64_t Predict(const cache::PageLayout& layout, const cache::PageCounts& pages,
                int64_t tokens) {
  int64_t least = kMaxTokens;
  for (const cache::PageGroupLayout& group : layout.page_groups()) {
    least = std::min(least, pages[static_cast<size_t>(group.id.value())] /
                                layout.PagesHeld(group.id, tokens, tokens));
  }
  return least;
}

// Fills a page pool. Its scheduler receives one sequence more than should fit;
// each has `tokens` tokens.
class Filler {
 public:
  // The pool must hold at least one sequence.
  static absl::StatusOr<std::unique_ptr<Filler>> Create(
      const cache::PageLayout& layout, const cache::PageCounts& pages,
      int64_t tokens, int64_t num_sequences) {
    auto filler = std::unique_ptr<Filler>(new Filler(
        cache::MakeKvCacheConfig(layout, pages, "capacity"), tokens));
    // A sequence has one token more than it has slots, because its last token
    // is sampled but not written into the cache.
    filler->decodes_ =
        layout.OneSequenceFits(pages, tokens + 1, tokens + 1).ok();
    SchedulerOptions options;
    options.max_model_len =
        static_cast<uint32_t>(tokens + (filler->decodes_ ? 1 : 0));
    options.max_num_seqs = static_cast<uint32_t>(num_sequences);
    options.max_batched_tokens = static_cast<uint32_t>(num_sequences * tokens);
    options.max_queue = options.max_num_seqs;
    options.vocab_size = 2;
    KVASIR_ASSIGN_OR_RETURN(
        filler->scheduler_,
        Scheduler::Create(options, {.cache = &filler->cache_,
                                    .clock = &base::Clock::Real()}));
    for (int64_t i = 0; i < num_sequences; ++i) {
      KVASIR_RETURN_IF_ERROR(filler->Add(i));
    }
    return filler;
  }

  // Returns how many sequences hold all their tokens at the same time. Their
  // pages stay allocated.
  absl::StatusOr<int64_t> Fill() {
    const kvasir::v1::StepPlan* plan = scheduler_->Schedule();
    if (plan == nullptr) return 0;
    if (!decodes_) return scheduler_->last_step().prefill_sequences;
    kvasir::v1::StepResult result;
    result.set_step_id(plan->step_id());
    for (const kvasir::v1::SequenceStep& step : plan->sequences()) {
      kvasir::v1::SequenceResult* const out = result.add_sequences();
      out->set_sequence_id(step.sequence_id());
      out->set_token_id(step.has_sample() ? 1 : -1);
    }
    KVASIR_RETURN_IF_ERROR(scheduler_->Apply(result));
    plan = scheduler_->Schedule();
    if (plan == nullptr) {
      return absl::InternalError("capacity: the scheduler returned no step");
    }
    return scheduler_->last_step().decode_sequences;
  }

  cache::KvCacheStats stats() const { return cache_.Stats(); }

  ~Filler() {
    if (scheduler_ == nullptr) return;
    scheduler_->FailAll({absl::CancelledError("capacity is measured"),
                         kvasir::v1::Refusal::REFUSAL_UNSPECIFIED});
  }

 private:
  Filler(cache::KvCacheConfig config, int64_t tokens)
      : cache_(std::move(config)), tokens_(tokens) {}

  absl::Status Add(int64_t index) {
    Request request;
    request.request_id = absl::StrCat("capacity-", index);
    request.prompt = proto::TokenBytes::Adopt(
        std::vector<int32_t>(static_cast<size_t>(tokens_ - 1), 0));
    request.sampling.set_max_tokens(2);
    request.sampling.set_ignore_eos(true);
    request.use_prefix_cache = false;
    return scheduler_->Add(std::move(request), sink_).status;
  }

  cache::KvCache cache_;
  const int64_t tokens_;
  bool decodes_ = false;
  const std::shared_ptr<NullSink> sink_ = std::make_shared<NullSink>();
  std::unique_ptr<Scheduler> scheduler_;
};

}  // namespace

absl::StatusOr<Capacity> MeasureCapacity(const model::DecoderSpec& spec,
                                         const kvasir::v1::KvPlan& plan,
                                         const CapacityOptions& options) {
  const int64_t tokens = options.sequence_tokens;
  if (tokens < 2 || tokens > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("capacity: a sequence must have from 2 to ", kMaxTokens,
                     " tokens, not ", tokens));
  }
  KVASIR_ASSIGN_OR_RETURN(const std::shared_ptr<const ServedPlan> served,
                          ServePlan(plan, model::AttentionShapeOf(spec), {}));
  KVASIR_ASSIGN_OR_RETURN(
      const cache::PageLayout layout,
      cache::PageLayout::Create(*served->resolved,
                                {.page_tokens = options.page_tokens}));
  const cache::PageCounts pages =
      layout.PagesForBudget({.budget_bytes = options.pool_bytes,
                             .max_model_len = tokens,
                             .max_chunk_tokens = tokens});
  Capacity capacity;
  capacity.bytes_per_sequence = layout.BytesAtLength(tokens, tokens);
  capacity.predicted = Predict(layout, pages, tokens);
  for (const int64_t count : pages) capacity.pool_pages += count;
  if (capacity.predicted == 0) {
    capacity.kv_bytes_per_token = layout.marginal_bytes_per_token();
    return capacity;
  }
  if ((capacity.predicted + 1) * tokens > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("capacity: the pool has room for ", capacity.predicted,
                     " sequences of ", tokens,
                     " tokens; with one more, they would exceed the limit of ",
                     kMaxTokens, " tokens in all: use a smaller pool"));
  }
  kernels::CpuAllocator allocator;
  KVASIR_ASSIGN_OR_RETURN(
      const KvArenas arenas,
      KvArenas::Create(*served->resolved, layout, pages, &allocator));
  capacity.kv_bytes_per_token = arenas.bytes_per_token();
  capacity.pool_bytes = allocator.use(kernels::MemoryTag::kKvCache).bytes;
  KVASIR_ASSIGN_OR_RETURN(
      const std::unique_ptr<Filler> filler,
      Filler::Create(layout, pages, tokens, capacity.predicted + 1));
  KVASIR_ASSIGN_OR_RETURN(capacity.reached, filler->Fill());
  const cache::KvCacheStats stats = filler->stats();
  for (size_t g = 0; g < stats.groups.size(); ++g) {
    capacity.held_bytes +=
        stats.groups[g].used_pages * arenas.page_bytes(static_cast<int64_t>(g));
  }
  return capacity;
}

}  // namespace kvasir::worker
