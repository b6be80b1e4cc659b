// Hashes the engine's tokens, log probabilities and logits for each plan, model
// family and checkpoint, and compares the hashes with a record. Chunks,
// batches, page size, preemption, threads and instruction set must not change a
// hash. A change of the code that changes a hash needs a new record.
//
// The record is tests/golden/bits/record.json. KVASIR_WRITE_BITS_RECORD=path
// writes a new record. KVASIR_ALL_CONDITIONS=1 runs every case under all
// conditions on all instruction sets; otherwise each case runs under a few
// conditions.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/types/span.h"
#include "base/status_matchers.h"
#include "gmock/gmock.h"
#include "kernels/testing/op_test_util.h"
#include "model/checkpoint/checkpoint.h"
#include "model/files/file.h"
#include "model/files/json.h"
#include "model/tokenizer/tokenizer.h"
#include "worker/offline/perplexity.h"
#include "worker/testing/family_plan_cases.h"
#include "worker/testing/invariance_scenario.h"
#include "worker/testing/prompt_lift_cases.h"

namespace kvasir::worker {
namespace {

constexpr int64_t kWindow = 24;

std::string InSource(const std::string& path) {
  const char* source = std::getenv("KVASIR_SOURCE_DIR");
  return absl::StrCat(source == nullptr ? "." : source, "/", path);
}

// Hashes a sequence of 32-bit words. Every word and their order affect the
// hash.
class Hash {
 public:
  void Add(uint32_t word) {
    hash_ = std::rotl((hash_ ^ word) * 0x9e3779b97f4a7c15, 29);
  }
  void Add(float number) { Add(std::bit_cast<uint32_t>(number)); }
  void Add(uint64_t number) {
    Add(static_cast<uint32_t>(number));
    Add(static_cast<uint32_t>(number >> 32));
  }
  uint64_t value() const { return hash_; }
  std::string text() const { return absl::StrCat(absl::Hex(hash_)); }

 private:
  uint64_t hash_ = 0x243f6a8885a308d3;
};

using Hashes = std::map<std::string, std::string>;  // key: what was hashed

// Hashes rows of logits as a set: a preempted sequence computes some rows
// twice, which must not change the hash.
class LogitsHash {
 public:
  void Add(const LogitsRow& row) {
    Hash hash;
    hash.Add(static_cast<uint64_t>(row.position));
    for (const float logit : row.logits) hash.Add(logit);
    rows_.insert(hash.value());
  }
  std::string text() const {
    Hash hash;
    for (const uint64_t row : rows_) hash.Add(row);
    return hash.text();
  }

 private:
  std::set<uint64_t> rows_;
};

Hashes HashesOf(const std::vector<Sample>& samples, const LogitsHash& logits) {
  Hash tokens;
  Hash numbers;
  for (const Sample& sample : samples) {
    tokens.Add(static_cast<uint64_t>(sample.tokens.size()));
    for (const int32_t id : sample.tokens) {
      tokens.Add(static_cast<uint32_t>(id));
    }
    numbers.Add(static_cast<uint64_t>(sample.numbers.size()));
    for (const float number : sample.numbers) numbers.Add(number);
  }
  return {{"tokens", tokens.text()},
          {"logprobs", numbers.text()},
          {"logits", logits.text()}};
}

struct BitsCase {
  std::string name;
  std::function<Worker(const Conditions&)> make;
  size_t num_requests = 8;
  // true: the model is trained, and prompts are real text
  bool trained = false;
};

// A tiny model with random weights. Its plan stores unquantized numbers
// as `dtype`.
BitsCase RandomCase(const std::string& name, const FamilyCase& each,
                    const std::string& dtype = "BF16") {
  return {.name = name, .make = [each, dtype](const Conditions& conditions) {
            return Worker(conditions, 0, &each.plan_case, each.shape, dtype);
          }};
}

void AddDenseCases(std::vector<BitsCase>* cases) {
  using plan_cases::Full;
  struct Family {
    std::string name;
    model::ModelShape shape;
    std::string stored;
  };
  for (const Family& family :
       {Family{"Llama", TinyShape(), "POST_ROPE"},
        Family{"Neox", TinyNeoxShape(), "POST_ROPE"},
        Family{"Opt", TinyOptShape(), "NO_ROPE"},
        Family{"Window", TinyWindowShape(kWindow), "POST_ROPE"}}) {
    const PlanCase dense = {"Dense", Full(family.stored), Full("NO_ROPE")};
    for (const char* dtype : {"BF16", "F16", "F32"}) {
      cases->push_back(RandomCase(absl::StrCat("Dense", family.name, dtype),
                                  {family.shape, dense}, dtype));
      cases->back().num_requests = 16;
    }
  }
  cases->push_back({.name = "DenseLayersOfTwoWindows",
                    .make = [](const Conditions& conditions) {
                      return Worker(conditions, kWindow);
                    }});
}

// A worker with the model in `folder`. Uses the folder's KV plan, or else a
// full-rank plan with the data type `dtype`.
Worker CheckpointWorker(Conditions conditions, const std::string& folder,
                        kvasir::v1::DataType dtype) {
  const auto checkpoint = model::Checkpoint::Open(InSource(folder));
  KVASIR_EXPECT_OK(checkpoint);
  const model::DecoderSpec& spec = checkpoint->spec();
  auto plan = plan::FullRankPlan(model::AttentionShapeOf(spec), dtype);
  if (checkpoint->kv_plan_json().has_value()) {
    const auto parsed =
        plan::ParsePlanJson(*checkpoint->kv_plan_json(), folder);
    KVASIR_EXPECT_OK(parsed.status());
    KVASIR_EXPECT_OK(checkpoint->CheckTensors(Resolved(*parsed, spec)));
    plan = *parsed;
  }
  // A model with learned positions cannot serve texts that are longer than its
  // table of positions.
  conditions.max_model_len = static_cast<uint32_t>(std::min<int64_t>(
      conditions.max_model_len, spec.max_position_embeddings));
  CheckpointSource source(&*checkpoint);
  return Worker(conditions, spec, plan, &source);
}

BitsCase CheckpointCase(const std::string& name, const std::string& folder,
                        kvasir::v1::DataType dtype) {
  return {.name = absl::StrReplaceAll(name, {{"-", "_"}}),
          .make = [folder, dtype](const Conditions& conditions) {
            return CheckpointWorker(conditions, folder, dtype);
          }};
}

std::vector<BitsCase> Cases() {
  std::vector<BitsCase> cases;
  AddDenseCases(&cases);
  for (const PlanCase& each : PlanCases()) {
    cases.push_back(RandomCase(each.name, {TinyShape(), each}));
    // A case with quantized codes stores no numbers of type `dtype`, so it
    // needs no test with other types.
    if (each.codes) continue;
    cases.push_back(RandomCase(each.name + "F16", {TinyShape(), each}, "F16"));
    cases.push_back(RandomCase(each.name + "F32", {TinyShape(), each}, "F32"));
  }
  for (const FamilyCase& each : FamilyCases(kWindow)) {
    cases.push_back(RandomCase(each.plan_case.name, each));
  }
  for (const FamilyCase& each : PromptLiftCases()) {
    cases.push_back(RandomCase("Lift" + each.plan_case.name, each, "F32"));
  }
  std::set<std::string> golden;
  for (const auto& entry :
       std::filesystem::directory_iterator(InSource("tests/golden/models"))) {
    golden.insert(entry.path().filename().string());
  }
  for (const std::string& name : golden) {
    const std::string folder = "tests/golden/models/" + name;
    cases.push_back(CheckpointCase("golden_" + name, folder, kvasir::v1::F32));
    cases.push_back(
        CheckpointCase("golden_" + name + "_bf16", folder, kvasir::v1::BF16));
  }
  for (const char* name : {"tiny", "tiny-palu"}) {
    const std::string folder = absl::StrCat("models/", name);
    cases.push_back(CheckpointCase(absl::StrCat("models_", name), folder,
                                   kvasir::v1::BF16));
    cases.back().num_requests = 6;
    cases.back().trained = true;
  }
  return cases;
}

// The tokens of the beginning of the evaluation text, and the number of bytes
// of each token.
struct Text {
  std::vector<int32_t> ids;
  std::vector<int32_t> bytes;
};
const Text& EvaluationText() {
  static const Text* const text = [] {
    constexpr size_t kTextBytes = 2000;
    auto* const made = new Text;
    const auto whole =
        model::ReadSmallFile(InSource("models/tiny/evaluation.txt"), 1 << 20);
    KVASIR_EXPECT_OK(whole.status());
    const auto tokenizer = model::Tokenizer::Load(InSource("models/tiny"));
    KVASIR_EXPECT_OK(tokenizer.status());
    const auto ids =
        (*tokenizer)
            ->Encode(std::string_view(*whole).substr(0, kTextBytes),
                     {.add_special_tokens = false, .parse_special = false});
    KVASIR_EXPECT_OK(ids.status());
    made->ids = *ids;
    for (const int32_t id : *ids) {
      made->bytes.push_back(
          static_cast<int32_t>((*tokenizer)->TokenBytes(id).size()));
    }
    return made;
  }();
  return *text;
}

// Returns the first `num_requests` requests of MixedRequests, changed to fit
// the model's length and vocabulary, and to report log probabilities. If `text`
// is not empty, the prompts are pieces of `text`.
std::vector<Request> RequestsFor(Worker& worker, size_t num_requests,
                                 absl::Span<const int32_t> text) {
  const auto max_model_len =
      static_cast<size_t>(worker.rank().executor().options().max_model_len);
  const auto vocab = static_cast<int32_t>(worker.rank().spec().vocab_size);
  std::vector<Request> requests = MixedRequests();
  requests.resize(num_requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    kvasir::v1::SamplingParams& sampling = requests[i].sampling;
    sampling.set_logprobs(20);
    sampling.set_prompt_logprobs(0);
    for (const int32_t id : {7, 11}) {  // biased ids of MixedRequests
      if (id >= vocab) sampling.mutable_logit_bias()->erase(id);
    }
    std::vector<int32_t> ids = requests[i].prompt.ToIds();
    ids.resize(std::min(ids.size(), max_model_len - sampling.max_tokens()));
    for (size_t t = 0; t < ids.size(); ++t) {
      ids[t] = text.empty() ? ids[t] % vocab : text[29 * i + t];
    }
    requests[i].prompt = proto::TokenBytes::Adopt(std::move(ids));
  }
  return requests;
}

// If `pages` is smaller than the default, requests are preempted, because not
// all of them fit into the pool.
std::vector<Conditions> AllConditions() {
  return {
      {.one_at_a_time = true},
      {.threads = 2},
      {.page_tokens = 32, .max_num_seqs = 7, .max_batched_tokens = 7},
      {.pages = 10},
      {.page_tokens = 64, .max_num_seqs = 3},
      {.threads = 3, .page_tokens = 32, .pages = 7},
      {.max_num_seqs = 2, .max_batched_tokens = 2},
      {.threads = 2, .page_tokens = 128, .max_batched_tokens = 33},
      {.threads = 2, .page_tokens = 32, .one_at_a_time = true},
  };
}

std::string TextOf(const Conditions& conditions) {
  return absl::StrCat(
      conditions.deterministic ? "deterministic, " : "",
      conditions.one_at_a_time ? "one at a time, " : "", conditions.threads,
      " threads, ", conditions.pages, " pages of ", conditions.page_tokens,
      ", at most ", conditions.max_num_seqs, " sequences and ",
      conditions.max_batched_tokens, " tokens in a step, ",
      conditions.backend == kernels::CpuBackend::kReference
          ? absl::StrCat("reference, granules of ", conditions.granule_bytes)
          : kernels::CpuTargetName());
}

// The instruction sets to test, the best first.
std::vector<int64_t> Targets() {
  const std::vector<int64_t> all = hwy::SupportedAndGeneratedTargets();
  if (std::getenv("KVASIR_ALL_CONDITIONS") != nullptr) return all;
  std::vector<int64_t> targets = {all.front()};
  if (all.front() < HWY_AVX2 && std::count(all.begin(), all.end(), HWY_AVX2)) {
    targets.push_back(HWY_AVX2);
  }
  return targets;
}

// The recorded hashes. The keys are the name of the case, the kind, and what
// was hashed. The kind is "lifted" if the rank uses prompt lifts
// (prompt_lift.h), else "exact".
class Record : public ::testing::Environment {
 public:
  static Record& Get() {
    static Record* const record = new Record;
    return *record;
  }

  void SetUp() override {
    if (path_to_write_ != nullptr) return;
    const auto text = model::ReadSmallFile(
        InSource("tests/golden/bits/record.json"), 1 << 20);
    KVASIR_ASSERT_OK(text.status());
    const auto root = model::ParseJson(*text, "record.json");
    KVASIR_ASSERT_OK(root.status());
    recorded_ = *root;
  }
  // If a new record was asked for, writes it with one case per line.
  void TearDown() override {
    if (path_to_write_ == nullptr) return;
    std::ofstream file(path_to_write_);
    const char* before = "{\n";
    for (const auto& [name, hashes] : recorded_.items()) {
      file << before << nlohmann::json(name) << ": " << hashes;
      before = ",\n";
    }
    file << "\n}\n";
    EXPECT_TRUE(file.flush()) << path_to_write_;
  }

  bool writes() const { return path_to_write_ != nullptr; }
  nlohmann::json& recorded() { return recorded_; }

  // Compares hashes with the record. While a new record is written, the first
  // conditions of a case define its hashes.
  void Expect(const std::string& name, const std::string& kind,
              const Hashes& have, const std::string& conditions) {
    for (const auto& [what, hash] : have) {
      nlohmann::json& want = recorded_[name][kind][what];
      if (writes() && want.is_null()) want = hash;
      EXPECT_EQ(want.is_null() ? "nothing" : want.get<std::string>(), hash)
          << name << ", " << kind << ": " << what
          << " differ from the record: " << conditions;
      seen_[name].insert(absl::StrCat(kind, " ", what));
    }
  }
  // Checks that the test computed all hashes that the record has for this case.
  void ExpectNothingElse(const std::string& name) {
    std::set<std::string> want;
    for (const auto& [kind, hashes] : recorded_[name].items()) {
      for (const auto& [what, hash] : hashes.items()) {
        want.insert(absl::StrCat(kind, " ", what));
      }
    }
    EXPECT_EQ(want, seen_[name])
        << name
        << ": the record has hashes that were not computed, or lacks some";
  }

 private:
  const char* const path_to_write_ = std::getenv("KVASIR_WRITE_BITS_RECORD");
  nlohmann::json recorded_ = nlohmann::json::object();
  std::map<std::string, std::set<std::string>> seen_;
};

[[maybe_unused]] const auto* const kRecord =
    ::testing::AddGlobalTestEnvironment(&Record::Get());

// Runs the case and returns whether its rank uses prompt lifts.
bool RunUnder(const BitsCase& each, Conditions conditions) {
  LogitsHash logits;
  conditions.logits_tap = [&](const LogitsRow& row) { logits.Add(row); };
  Worker worker = each.make(conditions);
  const bool lifts = worker.rank().executor().lifts_prompts();
  std::vector<int32_t> text;
  if (each.trained) text = EvaluationText().ids;
  const std::vector<Sample> samples =
      worker.Run(RequestsFor(worker, each.num_requests, text));
  Record::Get().Expect(each.name, lifts ? "lifted" : "exact",
                       HashesOf(samples, logits), TextOf(conditions));
  // Checks that requests were preempted in the small pool. With a sliding
  // window in every layer, requests free pages early, so there may be no
  // preemption.
  const auto& layers = worker.rank().spec().layers;
  if (conditions.pages < Conditions().pages &&
      std::all_of(layers.begin(), layers.end(), [](const auto& layer) {
        return layer.sliding_window == 0;
      })) {
    EXPECT_GT(worker.stats().preemptions, 0)
        << each.name << ": " << TextOf(conditions);
  }
  return lifts;
}

// Computes the perplexity of the evaluation text in three windows, each without
// context from the previous window.
void Score(const BitsCase& each, Conditions conditions) {
  conditions.max_model_len = 512;
  conditions.pages = Conditions().pages;
  conditions.deterministic = true;
  Worker worker = each.make(conditions);
  const Text& text = EvaluationText();
  const auto scored = Perplexity(
      &worker.rank().executor(),
      {.token_ids = text.ids, .token_bytes = text.bytes},
      {.window_tokens = 1 + static_cast<int64_t>(text.ids.size()) / 3});
  KVASIR_ASSERT_OK(scored.status());
  Hash hash;
  hash.Add(std::bit_cast<uint64_t>(scored->nats_per_byte));
  Record::Get().Expect(each.name, "exact", {{"perplexity", hash.text()}},
                       TextOf(conditions));
}

const std::vector<BitsCase>& AllCases() {
  static const auto* const cases = new std::vector<BitsCase>(Cases());
  return *cases;
}

class BitsRecordTest : public ::testing::TestWithParam<size_t> {
 protected:
  void TearDown() override { kernels::UseSimdTarget(0); }
};

TEST_P(BitsRecordTest, TokensLogprobsAndLogitsHaveTheRecordedBits) {
  const BitsCase& each = AllCases()[GetParam()];
  const std::vector<Conditions> all = AllConditions();
  const bool wide = std::getenv("KVASIR_ALL_CONDITIONS") != nullptr;
  // Each case runs under a few conditions. The first one differs between cases,
  // so that all cases together cover all conditions.
  size_t next = GetParam();
  const auto run = [&](bool deterministic) {
    bool lifts = false;
    for (size_t i = 0; i < (wide ? all.size() : 1); ++i) {
      Conditions conditions = all[next++ % all.size()];
      conditions.deterministic = deterministic;
      lifts = RunUnder(each, conditions);
    }
    return lifts;
  };
  bool lifts = true;
  for (const int64_t target : Targets()) {
    kernels::UseSimdTarget(target);
    run(/*deterministic=*/true);
    if (lifts) lifts = run(/*deterministic=*/false);
    if (each.trained) Score(each, all[next % all.size()]);
  }
  // The scalar reference kernels are slow, so only every seventh case runs with
  // them.
  if (wide || (!each.trained && GetParam() % 7 == 0)) {
    // Half of these runs use the page layout of GPUs (granules).
    for (const int64_t granule_bytes : {0, 16}) {
      if (!wide && (GetParam() % 14 == 0) != (granule_bytes == 0)) continue;
      RunUnder(each, {.deterministic = !lifts,
                      .backend = kernels::CpuBackend::kReference,
                      .granule_bytes = granule_bytes});
    }
  }
  Record::Get().ExpectNothingElse(each.name);
}

INSTANTIATE_TEST_SUITE_P(Cases, BitsRecordTest,
                         ::testing::Range(size_t{0}, AllCases().size()),
                         [](const auto& param_info) {
                           return AllCases()[param_info.param].name;
                         });

TEST(BitsRecordCasesTest, EveryCaseInTheRecordIsTested) {
  if (Record::Get().writes()) GTEST_SKIP() << "a record is being written";
  std::set<std::string> names;
  for (const BitsCase& each : AllCases()) names.insert(each.name);
  EXPECT_EQ(names.size(), AllCases().size()) << "two cases have the same name";
  for (const auto& [name, hashes] : Record::Get().recorded().items()) {
    EXPECT_TRUE(names.contains(name))
        << "the record has a case that is not tested: " << name;
  }
}

// Shows in the output that this machine could not test an instruction set of
// the record.
TEST(BitsRecordCasesTest, TheTestIsSkippedIfThisMachineLacksAvx2OrAvx512) {
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  const auto has = [&](auto is) {
    return std::any_of(targets.begin(), targets.end(), is);
  };
  if (!has([](int64_t target) { return target == HWY_AVX2; })) {
    GTEST_SKIP() << "NOT COMPARED: this CPU has no AVX2";
  }
  if (!has([](int64_t target) { return target < HWY_AVX2; })) {
    GTEST_SKIP() << "NOT COMPARED: this CPU has no AVX-512";
  }
}

}  // namespace
}  // namespace kvasir::worker
