// Measures what compression costs: compares models with the uncompressed model
// (the teacher) on windows of one text, and reports the bytes of their caches.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache/layout/layout.h"
#include "compress/evaluate/held_tokens.h"
#include "compress/evaluate/key_error.h"
#include "compress/oracle/layer_forward.h"
#include "compress/oracle/reference_decoder.h"
#include "model/tokenizer/tokenizer.h"

namespace kvasir::compress {

struct EvaluationText {
  std::string name;  // name of the text in reports
  std::vector<int32_t> ids;
  std::vector<int32_t> bytes;  // number of text bytes of each token
  // The start token, put before every window; empty if the tokenizer has none.
  std::optional<int32_t> bos;
};

// Reads and encodes a text. Errors: NotFound with the path; errors of
// Tokenizer::Encode.
absl::StatusOr<EvaluationText> ReadEvaluationText(
    const std::filesystem::path& path, const model::Tokenizer& tokenizer,
    int threads);

// Options of the repeat test, in which the model reads a passage, filler text
// and the passage again in one context. The loss on the second copy shows
// whether the cache still holds the first copy.
struct RepeatOptions {
  int64_t tests = 16;  // number of passages; 0: no test
  // Lengths of passage and filler; 0: chosen to fit the model's context
  // (Evaluator::repeat() returns the choice).
  int64_t passage_tokens = 0;
  int64_t filler_tokens = 0;
};

struct EvaluateOptions {
  // Length of a window, including the start token. Windows do not overlap.
  int64_t window_tokens = 512;
  int64_t min_windows = 100;
  int64_t max_windows = 0;  // 0: as many as fit into the text
  RepeatOptions repeat;
  // Number of windows on which the candidate's keys are compared with the
  // teacher's keys (KeyErrorMeter); 0: key errors are not measured.
  int64_t key_error_windows = 0;
  // Each thread evaluates windows of its own, and should use one BLAS thread
  // for its products (compress/runtime/cpu_setup.h). Results do not depend on
  // the number of threads.
  int threads = 1;
  // Called after every window, first for the teacher and then for each
  // candidate, by one thread at a time. `done` and `total` count the windows of
  // the current model. If it returns false, the evaluation ends with Cancelled.
  std::function<bool(int64_t done, int64_t total)> progress;
};

// A model to be compared. Its decoder, transform and eviction rules must
// outlive the call that uses it.
struct Candidate {
  std::string model;
  std::string method;
  const ReferenceDecoder* decoder = nullptr;
  const CacheTransform* transform = nullptr;
  // If null, the eviction of the decoder's plan is used.
  const EvictionRules* eviction = nullptr;
  // numbers cached per token, divided by those of an uncompressed cache
  double keep = 1.0;
  // Number of tokens at the beginning (sinks) and at the end (window) of a
  // sequence that are stored exactly: by a plan in addition to their codes, by
  // a baseline instead of them. If layers differ, this is the largest number.
  int64_t exact_sinks = 0;
  int64_t exact_window = 0;
  double kv_bytes_per_token = 0.0;
  double kv_payload_bytes_per_token = 0.0;
  int64_t fixed_bytes_per_sequence = 0;
  // The cache's page layout, from which the number of tokens that remain after
  // evictions follows. If null, the teacher's layout is used.
  std::shared_ptr<const cache::PageLayout> layout;
  std::optional<EvictionSummary> evicts;
};

// Makes the candidate for a model. cache::PageLayout counts its bytes. An
// uncompressed model caches whole keys and values in bf16.
absl::StatusOr<Candidate> MakeCandidate(std::string model,
                                        const ReferenceDecoder& decoder);

struct EvaluationRow {
  std::string model;
  std::string method;
  double keep = 1.0;
  int64_t exact_sinks = 0;
  int64_t exact_window = 0;
  double kv_bytes_per_token = 0.0;
  double kv_payload_bytes_per_token = 0.0;
  int64_t fixed_bytes_per_sequence = 0;
  // Bytes of the tokens that the cache still holds after it read a window as
  // one prompt, plus fixed_bytes_per_sequence.
  double kv_bytes_per_sequence = 0.0;
  std::optional<EvictionSummary> evicts;
  double nats_per_token = 0.0;
  double nats_per_byte = 0.0;
  double perplexity = 0.0;
  // Mean over windows of the model's loss minus the teacher's loss, and the
  // confidence interval (95 %) of this mean.
  double added_nats_per_token = 0.0;
  double added_low = 0.0;
  double added_high = 0.0;
  double top1_agreement = 0.0;
  double kl_nats = 0.0;  // mean of KL(teacher || model) over tokens
  // Mean loss on the second copies of passages; empty if there is no repeat
  // test.
  std::optional<double> repeat_nats_per_token;
  // Share of the numbers with static ranges that were outside their range and
  // therefore clamped.
  double clamp_rate = 0.0;
  // nullopt if key errors were not requested or cannot be measured
  std::optional<KeyError> key_error;
  std::vector<double> window_nats;  // loss of each window, per token
  std::vector<double> window_kl;    // kl_nats of each window
  std::vector<double> repeat_nats;  // loss of each second copy, per token
};

struct Evaluation {
  struct Teacher {
    std::string model;
    double nats_per_token = 0.0;
    double nats_per_byte = 0.0;
    double kv_bytes_per_token = 0.0;
    std::vector<double> window_nats;
  };
  Teacher teacher;
  std::string text;
  int64_t window_tokens = 0;
  int64_t windows = 0;
  std::vector<EvaluationRow> rows;
};

// Writes the evaluation as a JSON object, indented by `indent` spaces (-1: in
// one line).
std::string EvaluationToJson(const Evaluation& evaluation, int indent = 1);

// Holds the teacher's results for a text and compares candidates with them, one
// after the other.
// Owns: the last hidden states of the teacher, windows * window_tokens * hidden
//   numbers. In addition, every thread holds one window and blocks of at most
//   16 MiB of logits.
// Threads: one caller.
// Errors: InvalidArgument for a text that is too short (with the number of
//   tokens it has and needs), for fewer than two windows (which give no
//   interval), for windows longer than a model's context, and for a model whose
//   vocabulary differs from the teacher's; Cancelled; Internal for a loss that
//   is not finite, naming the model.
class Evaluator {
 public:
  // The teacher (an uncompressed candidate) must outlive the evaluator.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(
      const Candidate& teacher, EvaluationText text,
      const EvaluateOptions& options);

  absl::StatusOr<EvaluationRow> Evaluate(const Candidate& candidate) const;

  const Evaluation::Teacher& teacher() const { return summary_; }
  // Returns the report without rows; the caller adds the rows that Evaluate
  // returns.
  Evaluation report() const;
  // The options of the repeat test, with the lengths that were chosen.
  const RepeatOptions& repeat() const { return options_.repeat; }

 private:
  struct Window {
    at::Tensor inputs;         // [1, T]: token ids
    at::Tensor targets;        // [T]
    int64_t first_scored = 0;  // targets before this index do not count
  };
  struct Score {
    double nats = 0.0;  // loss per token
    double agreement = 0.0;
    double kl = 0.0;
  };

  Evaluator(const Candidate& teacher, EvaluationText text,
            const EvaluateOptions& options);

  absl::Status CheckText() const;
  absl::Status ChooseRepeat();
  absl::Status RunTeacher();
  double NatsPerByte(double nats_per_token) const;
  Window MakeWindow(int64_t index) const;
  Window MakeRepeat(int64_t index) const;
  // If `teacher_hidden` is undefined, predictions are not compared with those
  // of the teacher.
  absl::StatusOr<Score> ScoreWindow(const Candidate& candidate,
                                    const Window& window,
                                    const at::Tensor& teacher_hidden,
                                    const LayerHooks& hooks) const;
  absl::StatusOr<Score> ScoreRows(const Candidate& candidate,
                                  const Window& window,
                                  const at::Tensor& hidden,
                                  const at::Tensor& teacher_hidden) const;
  absl::Status ForEachWindow(
      const std::string& model, int64_t count,
      const std::function<absl::Status(int64_t)>& work) const;

  Candidate teacher_;
  EvaluationText text_;
  EvaluateOptions options_;
  int64_t text_per_window_ = 0;
  int64_t num_windows_ = 0;
  int64_t scored_bytes_ = 0;
  std::vector<at::Tensor> teacher_hidden_;  // [1, T, M] for each window
  std::vector<double> teacher_nats_;  // mean loss per token of each window
  std::optional<KeyErrorMeter> key_errors_;
  Evaluation::Teacher summary_;
};

}  // namespace kvasir::compress
