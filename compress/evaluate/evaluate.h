// Measures what compression costs: compares models with their uncompressed
// teacher, window by window of one text, with their true bytes.
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
  std::string name;  // for reports
  std::vector<int32_t> ids;
  std::vector<int32_t> bytes;  // bytes of the text, by token
  // Token before every window; set if the tokenizer begins texts with one.
  std::optional<int32_t> bos;
};

// NotFound with the path; errors of Tokenizer::Encode.
absl::StatusOr<EvaluationText> ReadEvaluationText(
    const std::filesystem::path& path, const model::Tokenizer& tokenizer,
    int threads);

// One context holds a passage, filler text and the passage again. The loss on
// the second copy shows whether the cache still holds the first copy.
struct RepeatOptions {
  int64_t tests = 16;  // 0: no test
  // 0: chosen to fit the model's context (see Evaluator::repeat()).
  int64_t passage_tokens = 0;
  int64_t filler_tokens = 0;
};

struct EvaluateOptions {
  // Tokens of a window, the start token included; windows do not overlap.
  int64_t window_tokens = 512;
  int64_t min_windows = 100;
  int64_t max_windows = 0;  // 0: as many as the text has
  RepeatOptions repeat;
  // Number of windows whose keys are compared with the teacher's
  // (KeyErrorMeter).
  int64_t key_error_windows = 0;
  // Windows are spread over threads. Each thread's products should use one BLAS
  // thread (compress/runtime/cpu_setup.h). Results do not depend on the number
  // of threads.
  int threads = 1;
  // Called after every window of one candidate (at first, of the teacher), by
  // one thread at a time. If it returns false, the evaluation ends with
  // Cancelled.
  std::function<bool(int64_t done, int64_t total)> progress;
};

// A model to be compared. Its decoder, transform and rules outlive the call.
struct Candidate {
  std::string model;
  std::string method;
  const ReferenceDecoder* decoder = nullptr;
  const CacheTransform* transform = nullptr;
  const EvictionRules* eviction = nullptr;  // null: as the plan says
  double keep = 1.0;  // share of the numbers that a full cache holds
  // Tokens that are kept exact beside codes: the first and latest ones of a
  // sequence, the most that any layer keeps.
  int64_t exact_sinks = 0;
  int64_t exact_window = 0;
  double kv_bytes_per_token = 0.0;
  double kv_payload_bytes_per_token = 0.0;
  int64_t fixed_bytes_per_sequence = 0;
  // Says which tokens are held. Null: as many as the teacher holds.
  std::shared_ptr<const cache::PageLayout> layout;
  std::optional<EvictionSummary> evicts;
};

// A model with its bytes by cache::PageLayout. An uncompressed model has a
// cache of whole bf16 keys and values.
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
  // Bytes after a window was read as one prompt: those of the slots that stay.
  double kv_bytes_per_sequence = 0.0;
  std::optional<EvictionSummary> evicts;
  double nats_per_token = 0.0;
  double nats_per_byte = 0.0;
  double perplexity = 0.0;
  // Difference from the teacher, paired by window; with a 95 % interval.
  double added_nats_per_token = 0.0;
  double added_low = 0.0;
  double added_high = 0.0;
  double top1_agreement = 0.0;
  double kl_nats = 0.0;  // KL(teacher || model), per token
  // Mean loss on second copies; empty if the test is not done.
  std::optional<double> repeat_nats_per_token;
  double clamp_rate = 0.0;  // of codes in static ranges
  // Empty if it was not asked for or cannot be measured.
  std::optional<KeyError> key_error;
  std::vector<double> window_nats;  // per token
  std::vector<double> window_kl;    // KL(teacher || model), per token
  std::vector<double> repeat_nats;  // per token of each second copy
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

// One JSON object, indented by `indent` (-1: in one line).
std::string EvaluationToJson(const Evaluation& evaluation, int indent = 1);

// Holds the teacher's predictions for a text and compares candidates with them,
// one after the other.
// Owns: the last hidden states of the teacher, windows * window_tokens * hidden
//   numbers. In addition, every thread holds one window and blocks of at most
//   16 MiB of logits.
// Threads: one caller.
// Errors: InvalidArgument for a text that is too short (with the tokens it has
//   and needs), fewer than two windows (which give no interval), windows beyond
//   a model's context, and another vocabulary; Cancelled; Internal for a loss
//   that is not finite, naming the model.
class Evaluator {
 public:
  // The teacher (an uncompressed candidate) outlives the evaluator.
  static absl::StatusOr<std::unique_ptr<Evaluator>> Create(
      const Candidate& teacher, EvaluationText text,
      const EvaluateOptions& options);

  absl::StatusOr<EvaluationRow> Evaluate(const Candidate& candidate) const;

  const Evaluation::Teacher& teacher() const { return summary_; }
  // The report without its rows.
  Evaluation report() const;
  // The repeat test with the sizes that were chosen.
  const RepeatOptions& repeat() const { return options_.repeat; }

 private:
  struct Window {
    at::Tensor inputs;         // [1, T]
    at::Tensor targets;        // [T]
    int64_t first_scored = 0;  // targets before it do not count
  };
  struct Score {
    double nats = 0.0;  // per token
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
  // `teacher_hidden` may be undefined: then nothing is compared.
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
  std::vector<at::Tensor> teacher_hidden_;  // per window [1, T, M]
  std::vector<double> teacher_nats_;        // per window and token
  std::optional<KeyErrorMeter> key_errors_;
  Evaluation::Teacher summary_;
};

}  // namespace kvasir::compress
