#include "compress/evaluate/evaluate.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "cache/layout/layout.h"
#include "compress/calibrate/token_stream.h"
#include "compress/evaluate/paired_interval.h"
#include "compress/runtime/for_each_index.h"
#include "compress/runtime/torch_status.h"
#include "model/shapes/attention_shape.h"
#include "nlohmann/json.hpp"

namespace kvasir::compress {
namespace {

// The smallest number of windows that gives a confidence interval.
constexpr int64_t kFewestWindows = 2;

// Maximum bytes of logits that a thread holds at a time for each model.
constexpr int64_t kLogitsBlockBytes = 16 << 20;

at::Tensor IdTensor(const std::vector<int32_t>& ids) {
  return at::tensor(ids, at::kInt).to(at::kLong);
}

// Returns the numbers that the cache stores per token, as a share of those that
// an uncompressed cache would store.
double KeptShare(const ReferenceDecoder& decoder) {
  const model::DecoderSpec& spec = decoder.spec();
  int64_t stored = 0;
  for (int64_t layer = 0; layer < spec.num_layers(); ++layer) {
    const LayerProgram& program = decoder.program(layer);
    for (const ProgramPart& part : program.key) stored += part.stored_width;
    stored += program.value.stored_width;
  }
  const int64_t all = 2 * spec.num_layers() * spec.num_kv_heads * spec.head_dim;
  return static_cast<double>(stored) / static_cast<double>(all);
}

}  // namespace

absl::StatusOr<EvaluationText> ReadEvaluationText(
    const std::filesystem::path& path, const model::Tokenizer& tokenizer,
    int threads) {
  KVASIR_ASSIGN_OR_RETURN(TokenStream stream,
                          EncodeFile(path, tokenizer, threads));
  EvaluationText text;
  text.name = path.filename().string();
  text.ids = std::move(stream.ids);
  text.bytes.reserve(text.ids.size());
  for (const int32_t id : text.ids) {
    text.bytes.push_back(static_cast<int32_t>(tokenizer.TokenBytes(id).size()));
  }
  KVASIR_ASSIGN_OR_RETURN(text.bos, StartToken(tokenizer));
  return text;
}

absl::StatusOr<Candidate> MakeCandidate(std::string model,
                                        const ReferenceDecoder& decoder) {
  const plan::AttentionShape shape = model::AttentionShapeOf(decoder.spec());
  const kvasir::v1::KvPlan plan = decoder.plan().has_value()
                                      ? *decoder.plan()
                                      : FullRankPlan(shape, kvasir::v1::BF16);
  KVASIR_ASSIGN_OR_RETURN(cache::PageLayout made,
                          cache::PageLayout::Create(plan, shape, {}));
  Candidate candidate;
  candidate.layout = std::make_shared<cache::PageLayout>(std::move(made));
  candidate.evicts = SummarizeEviction(plan, *candidate.layout);
  const cache::PageLayout& layout = *candidate.layout;
  candidate.model = std::move(model);
  candidate.method = plan.method();
  candidate.decoder = &decoder;
  candidate.keep = KeptShare(decoder);
  candidate.kv_bytes_per_token = layout.marginal_bytes_per_token();
  candidate.kv_payload_bytes_per_token =
      layout.marginal_payload_bytes_per_token();
  candidate.fixed_bytes_per_sequence = layout.fixed_bytes_per_sequence();
  for (const cache::LayerLayout& layer : layout.layers()) {
    for (const cache::SideLayout* side : {&layer.key, &layer.value}) {
      candidate.exact_sinks =
          std::max(candidate.exact_sinks, side->exact.sink_tokens);
      candidate.exact_window =
          std::max(candidate.exact_window, side->exact.window_tokens);
    }
  }
  return candidate;
}

Evaluator::Evaluator(const Candidate& teacher, EvaluationText text,
                     const EvaluateOptions& options)
    : teacher_(teacher), text_(std::move(text)), options_(options) {
  text_per_window_ = options_.window_tokens - (text_.bos.has_value() ? 1 : 0);
}

absl::StatusOr<std::unique_ptr<Evaluator>> Evaluator::Create(
    const Candidate& teacher, EvaluationText text,
    const EvaluateOptions& options) {
  std::unique_ptr<Evaluator> evaluator(
      new Evaluator(teacher, std::move(text), options));
  KVASIR_RETURN_IF_ERROR(evaluator->CheckText());
  KVASIR_RETURN_IF_ERROR(evaluator->ChooseRepeat());
  KVASIR_RETURN_IF_ERROR(evaluator->RunTeacher());
  return evaluator;
}

absl::Status Evaluator::CheckText() const {
  const model::DecoderSpec& spec = teacher_.decoder->spec();
  if (options_.window_tokens < 2 ||
      options_.window_tokens > spec.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat("windows must have 2 to ", spec.max_position_embeddings,
                     " tokens (the context of ", teacher_.model, "), but have ",
                     options_.window_tokens));
  }
  const int64_t windows = std::max(options_.min_windows, kFewestWindows);
  if (options_.max_windows > 0 && options_.max_windows < windows) {
    return absl::InvalidArgumentError(
        absl::StrCat("the number of windows is limited to ",
                     options_.max_windows, ", but must be at least ", windows));
  }
  const auto have = static_cast<int64_t>(text_.ids.size());
  if (have < windows * text_per_window_) {
    return absl::InvalidArgumentError(
        absl::StrCat(text_.name, " has ", have, " tokens, but ",
                     windows * text_per_window_, " are needed for ", windows,
                     " windows of ", text_per_window_, " tokens"));
  }
  if (text_.bos.has_value() &&
      (*text_.bos < 0 || *text_.bos >= spec.vocab_size)) {
    return absl::InvalidArgumentError(
        absl::StrCat(text_.name, ": the id of the start token is ", *text_.bos,
                     ", but the vocabulary of ", teacher_.model, " has ",
                     spec.vocab_size, " tokens"));
  }
  for (size_t i = 0; i < text_.ids.size(); ++i) {
    if (text_.ids[i] < 0 || text_.ids[i] >= spec.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat(text_.name, ": token ", i, " has the id ", text_.ids[i],
                       ", but the vocabulary of ", teacher_.model, " has ",
                       spec.vocab_size, " tokens"));
    }
  }
  if (text_.bytes.size() != text_.ids.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        text_.name, ": there must be one byte count for each of the ",
        text_.ids.size(), " tokens, but there are ", text_.bytes.size()));
  }
  return absl::OkStatus();
}

absl::Status Evaluator::ChooseRepeat() {
  RepeatOptions& repeat = options_.repeat;
  if (repeat.tests == 0) return absl::OkStatus();
  // One position of the context is reserved for the start token.
  const int64_t context = teacher_.decoder->spec().max_position_embeddings - 1;
  const auto tokens = static_cast<int64_t>(text_.ids.size());
  constexpr int64_t kPassage = 128;
  constexpr int64_t kFiller = 512;
  if (repeat.passage_tokens == 0) {
    repeat.passage_tokens = std::min({kPassage, context / 4, tokens / 4});
  }
  if (repeat.filler_tokens == 0) {
    repeat.filler_tokens =
        std::min({kFiller, context - 2 * repeat.passage_tokens, tokens / 2});
  }
  const int64_t longest = std::max(repeat.passage_tokens, repeat.filler_tokens);
  if (repeat.passage_tokens < 2 || repeat.filler_tokens < 0 ||
      2 * repeat.passage_tokens + repeat.filler_tokens > context ||
      2 * longest > tokens) {
    return absl::InvalidArgumentError(absl::StrCat(
        "repeat test: a passage of ", repeat.passage_tokens,
        " tokens and a filler of ", repeat.filler_tokens,
        " tokens do not fit: the passage must have at least 2 tokens, the "
        "filler at least 0, two passages and the filler together at most ",
        context,
        " (the context), and passage and filler each at most half of the "
        "text's ",
        tokens, " tokens"));
  }
  return absl::OkStatus();
}

Evaluator::Window Evaluator::MakeWindow(int64_t index) const {
  const auto begin = text_.ids.begin() + index * text_per_window_;
  std::vector<int32_t> ids;
  if (text_.bos.has_value()) ids.push_back(*text_.bos);
  ids.insert(ids.end(), begin, begin + text_per_window_);
  const at::Tensor all = IdTensor(ids);
  return {all.slice(0, 0, -1).unsqueeze(0), all.slice(0, 1), 0};
}

// Passages come from positions that are spread evenly over the first half of
// the text, fillers from the second half.
Evaluator::Window Evaluator::MakeRepeat(int64_t index) const {
  const RepeatOptions& repeat = options_.repeat;
  const auto half = static_cast<int64_t>(text_.ids.size()) / 2;
  const auto place = [&](int64_t length) {
    return (half - length) * index / std::max<int64_t>(repeat.tests, 1);
  };
  const auto passage = text_.ids.begin() + place(repeat.passage_tokens);
  const auto filler = text_.ids.begin() + half + place(repeat.filler_tokens);
  std::vector<int32_t> ids;
  if (text_.bos.has_value()) ids.push_back(*text_.bos);
  ids.insert(ids.end(), passage, passage + repeat.passage_tokens);
  ids.insert(ids.end(), filler, filler + repeat.filler_tokens);
  ids.insert(ids.end(), passage, passage + repeat.passage_tokens);
  const at::Tensor all = IdTensor(ids);
  // The first token of the second copy is not scored, because it cannot be
  // predicted from the text before it.
  const int64_t first =
      static_cast<int64_t>(ids.size()) - repeat.passage_tokens;
  return {all.slice(0, 0, -1).unsqueeze(0), all.slice(0, 1), first};
}

absl::Status Evaluator::ForEachWindow(
    const std::string& model, int64_t count,
    const std::function<absl::Status(int64_t)>& work) const {
  std::mutex mutex;
  absl::Status status;  // the status of the first window that failed
  std::atomic<bool> stop = false;
  int64_t done = 0;
  ForEachIndex(count, options_.threads, [&](int64_t i) {
    if (stop) return;
    const at::NoGradGuard no_grad;
    absl::Status own = work(i);
    const std::lock_guard lock(mutex);
    if (!own.ok() && status.ok()) {
      status = absl::Status(
          own.code(), absl::StrCat(model, ", window ", i, ": ", own.message()));
    }
    ++done;
    if (status.ok() && options_.progress && !options_.progress(done, count)) {
      status = absl::CancelledError("the evaluation was stopped");
    }
    stop = !status.ok();
  });
  return status;
}

absl::StatusOr<Evaluator::Score> Evaluator::ScoreRows(
    const Candidate& candidate, const Window& window, const at::Tensor& hidden,
    const at::Tensor& teacher_hidden) const {
  const int64_t tokens = window.targets.size(0);
  const int64_t row_bytes = candidate.decoder->spec().vocab_size *
                            static_cast<int64_t>(sizeof(float));
  const int64_t block = std::max<int64_t>(kLogitsBlockBytes / row_bytes, 1);
  Score sum;
  for (int64_t begin = window.first_scored; begin < tokens; begin += block) {
    const int64_t end = std::min(begin + block, tokens);
    const at::Tensor targets =
        window.targets.slice(0, begin, end).to(hidden.device());
    const auto log_probabilities =
        [&](const ReferenceDecoder& decoder,
            const at::Tensor& states) -> absl::StatusOr<at::Tensor> {
      KVASIR_ASSIGN_OR_RETURN(
          const at::Tensor logits,
          decoder.HeadLogits(states[0].slice(0, begin, end)));
      return at::log_softmax(logits, -1);
    };
    KVASIR_ASSIGN_OR_RETURN(const at::Tensor own,
                            log_probabilities(*candidate.decoder, hidden));
    sum.nats -=
        own.gather(1, targets.unsqueeze(1)).sum(at::kDouble).item<double>();
    if (!teacher_hidden.defined()) continue;
    KVASIR_ASSIGN_OR_RETURN(
        at::Tensor theirs,
        log_probabilities(*teacher_.decoder, teacher_hidden));
    theirs = theirs.to(own.device());
    sum.agreement += own.argmax(-1).eq(theirs.argmax(-1)).sum().item<double>();
    sum.kl += (theirs.exp() * (theirs - own)).sum(at::kDouble).item<double>();
  }
  const auto scored = static_cast<double>(tokens - window.first_scored);
  sum.nats /= scored;
  sum.agreement /= scored;
  sum.kl /= scored;
  if (!std::isfinite(sum.nats)) {
    return absl::InternalError(
        absl::StrCat("the loss of a window must be finite, is ", sum.nats));
  }
  return sum;
}

absl::StatusOr<Evaluator::Score> Evaluator::ScoreWindow(
    const Candidate& candidate, const Window& window,
    const at::Tensor& teacher_hidden, const LayerHooks& hooks) const {
  KVASIR_ASSIGN_OR_RETURN(const at::Tensor hidden,
                          candidate.decoder->LastHidden(window.inputs, hooks));
  return CatchTorch(
      [&] { return ScoreRows(candidate, window, hidden, teacher_hidden); });
}

absl::Status Evaluator::RunTeacher() {
  num_windows_ = static_cast<int64_t>(text_.ids.size()) / text_per_window_;
  if (options_.max_windows > 0) {
    num_windows_ = std::min(num_windows_, options_.max_windows);
  }
  teacher_hidden_.resize(static_cast<size_t>(num_windows_));
  teacher_nats_.resize(static_cast<size_t>(num_windows_));
  KVASIR_RETURN_IF_ERROR(
      ForEachWindow(teacher_.model, num_windows_, [&](int64_t i) {
        return CatchTorch([&]() -> absl::Status {
          const auto at = static_cast<size_t>(i);
          const Window window = MakeWindow(i);
          KVASIR_ASSIGN_OR_RETURN(teacher_hidden_[at],
                                  teacher_.decoder->LastHidden(window.inputs));
          KVASIR_ASSIGN_OR_RETURN(
              const Score score,
              ScoreRows(teacher_, window, teacher_hidden_[at], at::Tensor()));
          teacher_nats_[at] = score.nats;
          return absl::OkStatus();
        });
      }));
  for (int64_t i = 0; i < num_windows_; ++i) {
    const int64_t begin = i * text_per_window_;
    for (int64_t t = text_.bos.has_value() ? 0 : 1; t < text_per_window_; ++t) {
      scored_bytes_ += text_.bytes[static_cast<size_t>(begin + t)];
    }
  }
  if (scored_bytes_ == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(text_.name,
                     ": the tokens whose loss is measured have 0 bytes of text "
                     "together, so the loss per byte cannot be computed"));
  }
  summary_.model = teacher_.model;
  summary_.nats_per_token = MeanWithInterval(teacher_nats_).mean;
  summary_.nats_per_byte = NatsPerByte(summary_.nats_per_token);
  summary_.kv_bytes_per_token = teacher_.kv_bytes_per_token;
  summary_.window_nats = teacher_nats_;
  if (options_.key_error_windows > 0) {
    std::vector<at::Tensor> windows;
    const int64_t count = std::min(options_.key_error_windows, num_windows_);
    for (int64_t i = 0; i < count; ++i) {
      windows.push_back(MakeWindow(i).inputs[0]);
    }
    KVASIR_ASSIGN_OR_RETURN(key_errors_,
                            KeyErrorMeter::Create(*teacher_.decoder, windows));
  }
  return absl::OkStatus();
}

double Evaluator::NatsPerByte(double nats_per_token) const {
  const int64_t tokens = num_windows_ * (options_.window_tokens - 1);
  return nats_per_token * static_cast<double>(tokens) /
         static_cast<double>(scored_bytes_);
}

absl::StatusOr<EvaluationRow> Evaluator::Evaluate(
    const Candidate& candidate) const {
  const model::DecoderSpec& spec = candidate.decoder->spec();
  const model::DecoderSpec& teacher = teacher_.decoder->spec();
  if (spec.vocab_size != teacher.vocab_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(candidate.model, " has a vocabulary of ", spec.vocab_size,
                     " tokens, but the teacher ", teacher_.model, " has ",
                     teacher.vocab_size));
  }
  if (spec.max_position_embeddings < teacher.max_position_embeddings) {
    return absl::InvalidArgumentError(
        absl::StrCat(candidate.model, " has a context of ",
                     spec.max_position_embeddings, " tokens, but the teacher ",
                     teacher_.model, " has ", teacher.max_position_embeddings));
  }
  EvaluationRow row;
  row.model = candidate.model;
  row.method = candidate.method;
  row.keep = candidate.keep;
  row.exact_sinks = candidate.exact_sinks;
  row.exact_window = candidate.exact_window;
  row.kv_bytes_per_token = candidate.kv_bytes_per_token;
  row.kv_payload_bytes_per_token = candidate.kv_payload_bytes_per_token;
  row.fixed_bytes_per_sequence = candidate.fixed_bytes_per_sequence;
  row.kv_bytes_per_sequence =
      row.kv_bytes_per_token *
          SlotsOfPrompt(*(candidate.layout ? candidate : teacher_).layout,
                        options_.window_tokens) +
      static_cast<double>(row.fixed_bytes_per_sequence);
  row.evicts = candidate.evicts;

  const int64_t repeats = options_.repeat.tests;
  std::vector<Score> scores(static_cast<size_t>(num_windows_ + repeats));
  ClampCount clamps;
  const LayerHooks hooks{.eviction = candidate.eviction,
                         .transform = candidate.transform,
                         .clamp_count = &clamps};
  KVASIR_RETURN_IF_ERROR(ForEachWindow(
      candidate.model, num_windows_ + repeats, [&](int64_t i) -> absl::Status {
        const bool repeat = i >= num_windows_;
        KVASIR_ASSIGN_OR_RETURN(
            scores[static_cast<size_t>(i)],
            ScoreWindow(
                candidate,
                repeat ? MakeRepeat(i - num_windows_) : MakeWindow(i),
                repeat ? at::Tensor() : teacher_hidden_[static_cast<size_t>(i)],
                hooks));
        return absl::OkStatus();
      }));

  if (key_errors_.has_value() && candidate.transform == nullptr) {
    KVASIR_ASSIGN_OR_RETURN(row.key_error,
                            key_errors_->Measure(*candidate.decoder));
  }
  std::vector<double> added;
  const auto windows = static_cast<double>(num_windows_);
  for (size_t i = 0; i < teacher_nats_.size(); ++i) {
    row.window_nats.push_back(scores[i].nats);
    row.window_kl.push_back(scores[i].kl);
    added.push_back(scores[i].nats - teacher_nats_[i]);
    row.nats_per_token += scores[i].nats / windows;
    row.top1_agreement += scores[i].agreement / windows;
    row.kl_nats += scores[i].kl / windows;
  }
  row.nats_per_byte = NatsPerByte(row.nats_per_token);
  row.perplexity = std::exp(row.nats_per_token);
  const PairedInterval interval = MeanWithInterval(added);
  row.added_nats_per_token = interval.mean;
  row.added_low = interval.low;
  row.added_high = interval.high;
  if (repeats > 0) {
    double nats = 0.0;
    for (size_t i = teacher_nats_.size(); i < scores.size(); ++i) {
      nats += scores[i].nats / static_cast<double>(repeats);
      row.repeat_nats.push_back(scores[i].nats);
    }
    row.repeat_nats_per_token = nats;
  }
  if (clamps.codes > 0) {
    row.clamp_rate =
        static_cast<double>(clamps.clamped) / static_cast<double>(clamps.codes);
  }
  return row;
}

Evaluation Evaluator::report() const {
  Evaluation report;
  report.teacher = summary_;
  report.text = text_.name;
  report.window_tokens = options_.window_tokens;
  report.windows = num_windows_;
  return report;
}

std::string EvaluationToJson(const Evaluation& evaluation, int indent) {
  using Json = nlohmann::ordered_json;
  Json rows = Json::array();
  for (const EvaluationRow& row : evaluation.rows) {
    Json json{{"model", row.model},
              {"method", row.method},
              {"keep", row.keep},
              {"exact_sinks", row.exact_sinks},
              {"exact_window", row.exact_window},
              {"kv_bytes_per_token", row.kv_bytes_per_token},
              {"kv_payload_bytes_per_token", row.kv_payload_bytes_per_token},
              {"fixed_bytes_per_sequence", row.fixed_bytes_per_sequence},
              {"kv_bytes_per_sequence", row.kv_bytes_per_sequence},
              {"nats_per_token", row.nats_per_token},
              {"nats_per_byte", row.nats_per_byte},
              {"perplexity", row.perplexity},
              {"added_nats_per_token", row.added_nats_per_token},
              {"added_ci95", {row.added_low, row.added_high}},
              {"top1_agreement", row.top1_agreement},
              {"kl_nats", row.kl_nats}};
    json["repeat_nats_per_token"] = row.repeat_nats_per_token.has_value()
                                        ? Json(*row.repeat_nats_per_token)
                                        : Json(nullptr);
    json["clamp_rate"] = row.clamp_rate;
    if (row.evicts.has_value()) {
      json["eviction"] = EvictionJson(*row.evicts, evaluation.window_tokens);
    }
    if (row.key_error.has_value()) {
      json["key_error"] = row.key_error->relative;
      json["key_error_predicted"] = row.key_error->predicted.has_value()
                                        ? Json(*row.key_error->predicted)
                                        : Json(nullptr);
    }
    json["window_nats"] = row.window_nats;
    json["window_kl"] = row.window_kl;
    json["repeat_nats"] = row.repeat_nats;
    rows.push_back(std::move(json));
  }
  const Json json{
      {"teacher",
       {{"model", evaluation.teacher.model},
        {"nats_per_token", evaluation.teacher.nats_per_token},
        {"nats_per_byte", evaluation.teacher.nats_per_byte},
        {"kv_bytes_per_token", evaluation.teacher.kv_bytes_per_token},
        {"window_nats", evaluation.teacher.window_nats}}},
      {"text", evaluation.text},
      {"window_tokens", evaluation.window_tokens},
      {"windows", evaluation.windows},
      {"rows", std::move(rows)}};
  // Infinite numbers become null. Invalid UTF-8 in names is replaced.
  return json.dump(indent, ' ', /*ensure_ascii=*/false,
                   Json::error_handler_t::replace);
}

}  // namespace kvasir::compress
