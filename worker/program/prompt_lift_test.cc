// Tests prompt lifts. Checks which latents are lifted, that lifting changes
// outputs only by rounding, that chunks and batches change no bit, and that a
// deterministic rank lifts nothing.
#include "worker/program/prompt_lift.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/status_matchers.h"
#include "model/shapes/shape_config.h"
#include "worker/offline/direct_runner.h"
#include "worker/offline/perplexity.h"
#include "worker/program/attention_flops.h"
#include "worker/testing/invariance_scenario.h"
#include "worker/testing/prompt_lift_cases.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kPromptTokens = 64;
constexpr int64_t kTokens = kPromptTokens + 8;

std::vector<int32_t> Text(int64_t length) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < length; ++i) {
    ids.push_back(static_cast<int32_t>((i * i + 37 * i + 5) % 1237));
  }
  return ids;
}

// A rank whose cache stores unquantized values as float32, which adds
// no rounding.
std::unique_ptr<Rank> MakeRank(const FamilyCase& each, RankOptions options) {
  auto rank =
      MakePlannedRank(each.plan_case, options, nullptr, "F32", each.shape);
  KVASIR_EXPECT_OK(rank);
  return *std::move(rank);
}

struct Outcome {
  std::vector<float> logits;  // for every token
  ExecutorTotals totals;
  std::string numerics_id;
  bool lifts_prompts = false;
};

struct Cut {
  int64_t chunk = kPromptTokens;
  // Whether other sequences run in the same steps: prompts in the first steps,
  // and a decode in every step.
  bool with_others = false;
  bool deterministic = false;
};

// Runs a prompt in chunks of `cut.chunk`, then the remaining tokens one by one
// as output.
Outcome RunText(const FamilyCase& each, const Cut& cut) {
  Outcome outcome;
  RankOptions options = TinyOptions();
  options.deterministic = cut.deterministic;
  options.executor.max_batched_tokens = 2 * kPromptTokens;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    if (row.sequence_id != 1) return;
    outcome.logits.insert(outcome.logits.end(), row.logits.begin(),
                          row.logits.end());
  };
  const auto rank = MakeRank(each, options);
  DirectRunner runner(&rank->executor(), &rank->layout(), rank->pages());
  const std::vector<int32_t> ids = Text(kTokens);
  const std::vector<int32_t> other = Text(40);
  uint64_t others = 1;
  for (int64_t done = 0; done < kTokens;) {
    const int64_t count =
        done < kPromptTokens ? std::min(cut.chunk, kPromptTokens - done) : 1;
    std::vector<DirectStep> steps;
    if (cut.with_others && others < 3) {
      steps.push_back({.sequence_id = ++others, .token_ids = other});
    }
    steps.push_back({.sequence_id = 1,
                     .token_ids = absl::MakeConstSpan(ids).subspan(
                         static_cast<size_t>(done), static_cast<size_t>(count)),
                     .output = done >= kPromptTokens});
    if (cut.with_others) {
      steps.push_back({.sequence_id = 9,
                       .token_ids = absl::MakeConstSpan(other).first(1),
                       .output = true});
    }
    KVASIR_EXPECT_OK(runner.Run(steps));
    done += count;
  }
  outcome.totals = rank->executor().totals();
  outcome.numerics_id = rank->executor().numerics_id();
  outcome.lifts_prompts = rank->executor().lifts_prompts();
  return outcome;
}

// Returns the larger of two relative errors of `have`: the largest error, and
// the root mean square error.
double RelativeError(const std::vector<float>& have,
                     const std::vector<float>& want) {
  EXPECT_EQ(have.size(), want.size());
  double max_error = 0;
  double max_value = 0;
  double error_norm = 0;
  double norm = 0;
  for (size_t i = 0; i < have.size(); ++i) {
    const double value = want[i];
    const double error = have[i] - value;
    max_error = std::max(max_error, std::abs(error));
    max_value = std::max(max_value, std::abs(value));
    error_norm += error * error;
    norm += value * value;
  }
  return std::max(max_error / max_value, std::sqrt(error_norm / norm));
}

std::vector<Cut> Cuts() {
  return {{.chunk = kPromptTokens},
          {.chunk = 32},
          {.chunk = 7},
          {.chunk = 1},
          {.chunk = 32, .with_others = true},
          {.chunk = kPromptTokens, .with_others = true}};
}

class PromptLiftTest : public ::testing::TestWithParam<FamilyCase> {
 protected:
  // Floating-point operations that the prompt lifts of all layers need for one
  // slot.
  static double FlopsPerSlot() {
    auto spec = model::SpecOfShape(GetParam().shape);
    KVASIR_EXPECT_OK(spec);
    const plan::ResolvedPlan plan =
        Resolved(PlanOf(GetParam().plan_case, *spec), *spec);
    double flops = 0;
    const auto add = [&flops](const PartProgram& part,
                              const std::optional<PromptLift>& lift) {
      if (!lift.has_value()) return;
      for (const double head : LiftFlops(part, lift->dims)) flops += head;
    };
    for (int64_t layer = 0; layer < spec->num_layers(); ++layer) {
      auto program =
          MakeAttentionProgram(plan.attention_of(layer), plan.shape, layer,
                               {plan.query_heads, plan.kv_heads});
      KVASIR_EXPECT_OK(program);
      PlanPromptLifts(&*program);
      for (const KeyProgram& part : program->key) add(part, part.prompt_lift);
      add(program->value, program->value.prompt_lift);
    }
    return flops;
  }
};

TEST(InvarianceNameTest,
     TheReportedInvarianceIsNoStrongerThanTheDeviceGuarantees) {
  EXPECT_EQ(InvarianceName(false), "bits");
  EXPECT_EQ(InvarianceName(true), "bits but for reused output");
  EXPECT_EQ(InvarianceName(false, false), "rounding");
  EXPECT_EQ(InvarianceName(true, false), "rounding");
}

TEST_P(PromptLiftTest, ChunkAndBatchSizesChangeNoBitWhenPromptsAreLifted) {
  const Outcome whole = RunText(GetParam(), {});
  EXPECT_TRUE(whole.lifts_prompts);
  EXPECT_EQ(whole.numerics_id, "cpu-f32-3-lifted");
  for (const Cut& cut : Cuts()) {
    const Outcome other = RunText(GetParam(), cut);
    EXPECT_EQ(other.logits, whole.logits)
        << "chunk " << cut.chunk << (cut.with_others ? " with others" : "");
    EXPECT_GE(other.totals.prompt_lift_flops, whole.totals.prompt_lift_flops);
  }
}

TEST_P(PromptLiftTest, LiftingPromptsChangesTheirLogitsOnlyByRounding) {
  const Outcome absorbed = RunText(GetParam(), {.deterministic = true});
  const Outcome lifted = RunText(GetParam(), {});
  const double error = RelativeError(lifted.logits, absorbed.logits);
  EXPECT_GT(error, 0);
  // With quantized codes, a rounding error may move a value to the next code.
  EXPECT_LE(error, GetParam().plan_case.codes ? 2e-2 : 1e-5);
}

TEST_P(PromptLiftTest, ADeterministicRankDoesNotLiftPrompts) {
  const Outcome whole = RunText(GetParam(), {.deterministic = true});
  EXPECT_FALSE(whole.lifts_prompts);
  EXPECT_EQ(whole.numerics_id, "cpu-f32-3");
  for (Cut cut : Cuts()) {
    cut.deterministic = true;
    const Outcome other = RunText(GetParam(), cut);
    EXPECT_EQ(other.totals.prompt_lift_flops, 0);
    EXPECT_EQ(other.logits, whole.logits) << cut.chunk;
  }
}

// The prompt is one tile of queries, so it reads each of its slots once.
TEST_P(PromptLiftTest, FlopsOfPromptLiftsAreCountedAsReconstructionFlops) {
  const ExecutorTotals lifted = RunText(GetParam(), {}).totals;
  const ExecutorTotals absorbed =
      RunText(GetParam(), {.deterministic = true}).totals;
  EXPECT_GT(FlopsPerSlot(), 0);
  EXPECT_EQ(lifted.prompt_lift_flops, FlopsPerSlot() * kPromptTokens);
  EXPECT_EQ(lifted.reconstruction_flops,
            absorbed.reconstruction_flops + lifted.prompt_lift_flops);
}

// One step of one sequence. All sequences have the same text and use the same
// pages, so a later sequence finds the cache that earlier ones wrote, as after
// a prefix-cache hit.
struct Piece {
  uint64_t sequence_id = 0;
  int64_t begin = 0;
  int64_t end = 0;
  bool prompt = true;
};

// Runs `pieces`, one step each, and returns the logits of sequence 2 from
// position `first` on.
std::vector<float> LogitsOfReader(const FamilyCase& each,
                                  const std::vector<Piece>& pieces,
                                  int64_t first, bool deterministic) {
  std::vector<float> logits;
  RankOptions options = TinyOptions();
  options.deterministic = deterministic;
  options.executor.max_batched_tokens = options.executor.max_model_len;
  options.executor.logits_tap = [&](const LogitsRow& row) {
    if (row.sequence_id != 2 || row.position < first) return;
    logits.insert(logits.end(), row.logits.begin(), row.logits.end());
  };
  const auto rank = MakeRank(each, options);
  const std::vector<int32_t> ids = Text(pieces.back().end);
  uint64_t last_sequence = 0;
  for (const Piece& piece : pieces) {
    kvasir::v1::StepPlan plan;
    plan.set_step_id(rank->executor().last_step_id() + 1);
    kvasir::v1::SequenceStep* const step = plan.add_sequences();
    step->set_sequence_id(piece.sequence_id);
    if (piece.sequence_id != last_sequence) {
      if (last_sequence != 0) plan.add_released_sequences(last_sequence);
      last_sequence = piece.sequence_id;
      auto* const table = step->add_block_tables();
      table->set_reset(true);
      for (int32_t page = 0; page < 5; ++page) table->add_appended_pages(page);
    }
    step->mutable_token_ids()->Add(ids.begin() + piece.begin,
                                   ids.begin() + piece.end);
    step->set_num_tokens(static_cast<uint32_t>(piece.end - piece.begin));
    step->set_logical_start(static_cast<uint64_t>(piece.begin));
    step->set_prompt(piece.prompt);
    KVASIR_EXPECT_OK(rank->executor().Execute(plan).status());
  }
  return logits;
}

// A part of the request's prompt is in pages that another request wrote as
// output. The request reuses these pages.
TEST_P(PromptLiftTest,
       ReusingPagesThatWereWrittenAsOutputChangesLogitsOnlyByRounding) {
  const PlanCase& plan_case = GetParam().plan_case;
  if (plan_case.key_exact + plan_case.value_exact > 0) {
    return;  // plans with exact rows reuse no pages
  }
  const int64_t reused = 64;  // 4 pages of 16 tokens
  const int64_t end = 80;
  std::vector<Piece> pieces = {{.sequence_id = 1, .begin = 0, .end = 32}};
  for (int64_t at = 32; at < reused; ++at) {
    pieces.push_back(
        {.sequence_id = 1, .begin = at, .end = at + 1, .prompt = false});
  }
  pieces.push_back({.sequence_id = 2, .begin = reused, .end = end});
  const std::vector<Piece> alone = {{.sequence_id = 2, .begin = 0, .end = end}};
  const auto logits = [&](const std::vector<Piece>& run, bool deterministic) {
    return LogitsOfReader(GetParam(), run, reused, deterministic);
  };
  EXPECT_EQ(logits(pieces, true), logits(alone, true));

  const double error =
      RelativeError(logits(pieces, false), logits(alone, false));
  EXPECT_LE(error, plan_case.codes ? 2e-2 : 1e-5);
  if (!plan_case.codes) {
    EXPECT_GT(error, 0);
  }
  // If the pages were written as prompt, reusing them changes no bit.
  for (Piece& piece : pieces) piece.prompt = true;
  EXPECT_EQ(logits(pieces, false), logits(alone, false));
}

class PromptLiftScenarioTest : public PromptLiftTest {
 protected:
  std::unique_ptr<Worker> MakeWorker(Conditions conditions) {
    conditions.deterministic = false;
    return std::make_unique<Worker>(conditions, 0, &GetParam().plan_case,
                                    GetParam().shape);
  }
  static std::vector<Request> Requests() {
    std::vector<Request> requests = MixedRequests();
    requests.resize(8);
    return requests;
  }
};

TEST_P(PromptLiftScenarioTest,
       BatchSizePageSizeAndPreemptionChangeNoBitWhenPromptsAreLifted) {
  const std::vector<Sample> alone =
      MakeWorker({.one_at_a_time = true})->Run(Requests());
  EXPECT_EQ(MakeWorker({.threads = 2})->Run(Requests()), alone);
  EXPECT_EQ(MakeWorker(
                {.page_tokens = 32, .max_num_seqs = 7, .max_batched_tokens = 7})
                ->Run(Requests()),
            alone);
  int64_t preemptions = 0;
  int64_t imports = 0;
  for (const int64_t pages : {10, 12}) {
    for (const int64_t host_pages : {0, 16}) {
      const auto worker =
          MakeWorker({.pages = pages, .host_pages = host_pages});
      EXPECT_EQ(worker->Run(Requests()), alone) << pages;
      preemptions += worker->stats().preemptions - worker->stats().exports;
      imports += worker->stats().imports;
    }
  }
  EXPECT_GT(preemptions, 0);
  EXPECT_GT(imports, 0);
}

TEST_P(PromptLiftScenarioTest,
       ReusingPagesThatWereWrittenAsPromptChangesNoBitOfTheOutput) {
  std::vector<Request> requests = Requests();
  const std::vector<Sample> alone =
      MakeWorker({.one_at_a_time = true})->Run(requests);
  for (Request& request : requests) request.use_prefix_cache = true;
  const auto worker = MakeWorker({.max_num_seqs = 4});
  worker->Run(requests);
  EXPECT_EQ(worker->Run(requests), alone);
  EXPECT_GT(worker->stats().hit_tokens, 0);
}

TEST_P(PromptLiftTest,
       TheChunkSizeChangesNoBitOfTheLossAndLiftingChangesItOnlyByRounding) {
  const std::vector<int32_t> ids = Text(200);
  const std::vector<int32_t> bytes(ids.size(), 1);
  RankOptions options = TinyOptions();
  options.executor.max_batched_tokens = 100;
  const auto nats = [&](Rank* rank, int64_t chunk) {
    const auto result =
        Perplexity(&rank->executor(), {ids, bytes},
                   {.window_tokens = 100, .chunk_tokens = chunk});
    KVASIR_EXPECT_OK(result);
    return result->nats_per_byte;
  };
  const auto rank = MakeRank(GetParam(), options);
  const double whole = nats(rank.get(), 100);
  for (const int64_t chunk : {13, 64}) {
    EXPECT_EQ(nats(rank.get(), chunk), whole) << chunk;
  }
  options.deterministic = true;
  const auto absorbing = MakeRank(GetParam(), options);
  const double share = GetParam().plan_case.codes ? 1e-4 : 1e-6;
  EXPECT_NEAR(nats(absorbing.get(), 64), whole, share * whole);
}

INSTANTIATE_TEST_SUITE_P(Cases, PromptLiftTest,
                         ::testing::ValuesIn(PromptLiftCases()),
                         [](const auto& parameter) {
                           return parameter.param.plan_case.name;
                         });

INSTANTIATE_TEST_SUITE_P(Cases, PromptLiftScenarioTest,
                         ::testing::ValuesIn(PromptLiftCases()),
                         [](const auto& parameter) {
                           return parameter.param.plan_case.name;
                         });

AttentionProgram Program(const PlanCase& each, const model::ModelShape& shape) {
  auto spec = model::SpecOfShape(shape);
  KVASIR_EXPECT_OK(spec);
  const plan::ResolvedPlan plan = Resolved(PlanOf(each, *spec), *spec);
  auto program = MakeAttentionProgram(plan.attention_of(0), plan.shape, 0,
                                      {plan.query_heads, plan.kv_heads});
  KVASIR_EXPECT_OK(program);
  return *std::move(program);
}

PlanCase CaseNamed(const std::string& name) {
  for (const FamilyCase& each : PromptLiftCases()) {
    if (each.plan_case.name == name) return each.plan_case;
  }
  ADD_FAILURE() << name;
  return {};
}

TEST(PlanPromptLiftsTest,
     FromRowsIsTheSmallestNumberOfRowsForWhichLiftingIsCheaper) {
  // One latent of 16 channels for 4 KV heads of 8 dims. Lifting it costs 512
  // products per slot (4 * 16 * 8) and saves 64 per row: 16 - 8 for each of 8
  // query heads. So lifting pays for more than 8 rows.
  AttentionProgram program = Program(CaseNamed("JointValues"), TinyShape());
  PlanPromptLifts(&program);
  const PromptLift want = {.dims = 8, .from_rows = 9};
  EXPECT_EQ(program.value.prompt_lift, want);
  EXPECT_EQ(LiftFlops(program.value, 8), std::vector<double>(4, 2 * 16 * 8));
  EXPECT_FALSE(program.key[0].prompt_lift.has_value());
  EXPECT_TRUE(LiftsPrompts(program));
  // The latent of a static basis over all heads has 32 channels.
  program = Program(CaseNamed("BasisKeys"), TinyShape());
  PlanPromptLifts(&program);
  const PromptLift keys = {.dims = 8, .from_rows = 6};
  EXPECT_EQ(program.key[0].prompt_lift, keys);
}

// Some parts get no prompt lift: parts that are narrower than a head or have an
// online Hadamard transform, folded lifts, and keys that are rebuilt anyway.
TEST(PlanPromptLiftsTest,
     OnlyPartsLiftedAtRunTimeAndWiderThanAHeadAreLiftedForPrompts) {
  const std::set<std::string> lifting = {"PaluJointCodes",
                                         "CommutingFastReconstructedSlow",
                                         "Basis",
                                         "BasisCodes",
                                         "RotatedBasisCodes",
                                         "ExactPaluJoint",
                                         "ExactBasis",
                                         "ExactKeysOfParts",
                                         "FallingBits",
                                         "FallingBitsOfTokens",
                                         "ExactFallingBits",
                                         "KeyAndValue",
                                         "KeyAndValueOfTwo",
                                         "KeyAndValueCodes",
                                         "KeyAndValueBasisOfTwo",
                                         "ExactKeyAndValue",
                                         "KeyAndValueFallingBits",
                                         "ExactKeyAndValueFallingBits",
                                         "SinksKeyAndValueFallingBits",
                                         "SinksPaluJoint",
                                         "SinksBasis",
                                         "SinksKeysOfParts"};
  int without = 0;
  for (const PlanCase& each : PlanCases()) {
    const bool lifts = lifting.contains(each.name);
    AttentionProgram program = Program(each, TinyShape());
    PlanPromptLifts(&program);
    EXPECT_EQ(LiftsPrompts(program), lifts) << each.name;
    if (!lifts) ++without;
  }
  EXPECT_GT(without, 10);
}

// For plans without lifts, the `deterministic` flag must not change a bit.
TEST(PlanPromptLiftsTest,
     TheDeterministicFlagChangesNoBitOfPlansWithoutPromptLifts) {
  for (const char* name :
       {"PaluHeads", "PairsCodes", "Commuting", "Channels"}) {
    for (const PlanCase& each : PlanCases()) {
      if (each.name != name) continue;
      SCOPED_TRACE(name);
      const FamilyCase family = {TinyShape(), each};
      const Outcome exact = RunText(family, {.deterministic = true});
      for (const Cut& cut : Cuts()) {
        const Outcome other = RunText(family, cut);
        EXPECT_EQ(other.logits, exact.logits) << cut.chunk;
        EXPECT_EQ(other.numerics_id, exact.numerics_id);
        EXPECT_FALSE(other.lifts_prompts);
      }
    }
  }
}

}  // namespace
}  // namespace kvasir::worker
