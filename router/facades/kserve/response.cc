#include "router/facades/kserve/response.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "router/facades/calls/backend.h"

namespace kvasir::router {
namespace {

using inference::ModelInferResponse;
using Shape = std::vector<int64_t>;

// Adds an output and returns its bytes in raw_output_contents, which the caller
// fills in. The typed contents are not used, because clients can read only
// BYTES from them.
std::string* AddOutput(const char* name, const char* datatype,
                       const Shape& shape, ModelInferResponse* response) {
  auto* output = response->add_outputs();
  output->set_name(name);
  output->set_datatype(datatype);
  for (const int64_t dim : shape) output->add_shape(dim);
  return response->add_raw_output_contents();
}

template <typename T>
void AppendRaw(T value, std::string* raw) {
  char bytes[sizeof(T)];
  std::memcpy(bytes, &value, sizeof(T));
  raw->append(bytes, sizeof(T));
}

constexpr const char* DatatypeOf(float) { return "FP32"; }
constexpr const char* DatatypeOf(int32_t) { return "INT32"; }
constexpr const char* DatatypeOf(uint32_t) { return "UINT32"; }

template <typename T>
void AddNumbers(const char* name, const Shape& shape,
                const std::vector<T>& values, ModelInferResponse* response) {
  std::string* raw = AddOutput(name, DatatypeOf(T()), shape, response);
  raw->reserve(values.size() * sizeof(T));
  for (const T value : values) AppendRaw(value, raw);
}

void AddStrings(const char* name, const std::vector<std::string>& values,
                ModelInferResponse* response) {
  std::string* raw =
      AddOutput(name, "BYTES", {static_cast<int64_t>(values.size())}, response);
  for (const std::string& value : values) {
    AppendRaw(static_cast<uint32_t>(value.size()), raw);
    raw->append(value);
  }
}

// Returns the log probabilities of a token's candidates as JSON:
// {"17": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}, ...}
std::string LogprobJson(int32_t id, const kvasir::v1::TokenLogprob& logprob,
                        const TextCodec& codec) {
  nlohmann::ordered_json entries = nlohmann::ordered_json::object();
  const auto add = [&entries, &codec](int32_t token, float value,
                                      std::optional<int> rank) {
    nlohmann::ordered_json entry;
    entry["logprob"] = value;
    entry["rank"] =
        rank ? nlohmann::ordered_json(*rank) : nlohmann::ordered_json();
    entry["decoded_token"] = codec.TokenText(token);
    entries[std::to_string(token)] = std::move(entry);
  };
  add(id, logprob.logprob(), std::nullopt);
  for (int i = 0; i < logprob.top_size(); ++i) {
    add(logprob.top(i).token_id(), logprob.top(i).logprob(), i + 1);
  }
  return entries.dump(-1, ' ', false,
                      nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

KserveAnswer::KserveAnswer(KserveRequest request, KserveAnswerContext context)
    : request_(std::move(request)),
      context_(std::move(context)),
      ending_ids_(request_.sampling, context_.eos_ids) {
  samples_.resize(std::max<uint32_t>(1, request_.sampling.n()));
  if (request_.schema == KserveSchema::kTrtTokens) return;
  const std::vector<int32_t> prompt_ids = context_.prompt.ToIds();
  for (Sample& sample : samples_) {
    sample.text = NewTextStream(*context_.codec, prompt_ids, request_,
                                request_.include_stop_string);
  }
}

void KserveAnswer::OnTokens(const kvasir::v1::GenerateEvent::Tokens& tokens) {
  if (tokens.index() >= samples_.size()) return;
  Sample& sample = samples_[tokens.index()];
  for (int i = 0; i < tokens.token_ids_size(); ++i) {
    if (!sample.finish_reason.empty()) return;
    if (sample.maybe_last_id) {
      const int32_t id = *std::exchange(sample.maybe_last_id, std::nullopt);
      AddToken(id, &sample.maybe_last_logprob, /*in_text=*/true, &sample);
      if (!sample.finish_reason.empty()) return;
    }
    const int32_t id = tokens.token_ids(i);
    const kvasir::v1::TokenLogprob* logprob =
        i < tokens.logprobs_size() ? &tokens.logprobs(i) : nullptr;
    if (ending_ids_.Contain(id)) {
      sample.maybe_last_id = id;
      sample.maybe_last_logprob =
          logprob != nullptr ? *logprob : kvasir::v1::TokenLogprob();
      continue;
    }
    AddToken(id, logprob, /*in_text=*/true, &sample);
  }
}

void KserveAnswer::AddToken(int32_t id, const kvasir::v1::TokenLogprob* logprob,
                            bool in_text, Sample* sample) {
  ++sample->num_new_tokens;
  if (logprob != nullptr && request_.sampling.has_logprobs()) {
    AddLogprob(id, *logprob, sample);
  }
  if (!in_text) return;
  if (sample->text == nullptr) {
    sample->new_ids.push_back(id);
    return;
  }
  sample->new_text += sample->text->Push({&id, 1}).text;
  if (sample->text->stopped()) sample->finish_reason = "stop";
}

void KserveAnswer::AddLogprob(int32_t id,
                              const kvasir::v1::TokenLogprob& logprob,
                              Sample* sample) {
  sample->cumulative_logprob += static_cast<double>(logprob.logprob());
  if (request_.outputs.output_log_probs) {
    sample->new_logprobs.push_back(logprob.logprob());
  }
  if (request_.outputs.logprobs) {
    if (!sample->new_logprobs_json.empty()) sample->new_logprobs_json += ", ";
    sample->new_logprobs_json += LogprobJson(id, logprob, *context_.codec);
  }
}

void KserveAnswer::OnFinish(const kvasir::v1::GenerateEvent::Finish& finish) {
  if (finish.index() >= samples_.size()) return;
  EndSample(FinishReasonText(finish.reason()), &samples_[finish.index()]);
}

void KserveAnswer::Stop() {
  for (Sample& sample : samples_) EndSample("abort", &sample);
}

void KserveAnswer::EndSample(const std::string& reason, Sample* sample) {
  if (!sample->finish_reason.empty()) return;
  if (sample->maybe_last_id) {
    const int32_t id = *std::exchange(sample->maybe_last_id, std::nullopt);
    // If the reason is "stop", this token ended the sample. Otherwise it is
    // output like any other token: the output was shorter than min_tokens, or
    // the request was stopped.
    const bool ended = reason == "stop";
    // As in vLLM, a token that ended the sample counts as output in vLLM's
    // schema. As in TensorRT-LLM, it does not count in TensorRT-LLM's schemas.
    if (!ended || !IsTrt()) {
      AddToken(id, &sample->maybe_last_logprob,
               /*in_text=*/!ended || request_.include_stop_string, sample);
    }
    if (!sample->finish_reason.empty()) return;
  }
  if (sample->text != nullptr) {
    sample->new_text += sample->text->Finish();
    if (sample->text->stopped()) {
      sample->finish_reason = "stop";
      return;
    }
  }
  sample->finish_reason = reason;
}

bool KserveAnswer::finished() const {
  return std::all_of(
      samples_.begin(), samples_.end(),
      [](const Sample& sample) { return !sample.finish_reason.empty(); });
}

bool KserveAnswer::HasNewData(const Sample& sample) const {
  return !sample.new_text.empty() || !sample.new_ids.empty();
}

bool KserveAnswer::HasNewOutputs(const Sample& sample) const {
  const KserveOutputs& outputs = request_.outputs;
  const bool counted = outputs.num_output_tokens ||
                       outputs.cumulative_logprob || outputs.cum_log_probs;
  return HasNewData(sample) || !sample.new_logprobs.empty() ||
         !sample.new_logprobs_json.empty() ||
         (counted && sample.num_new_tokens > 0);
}

bool KserveAnswer::HasResponse() const {
  if (complete_) return false;
  if (finished()) return true;
  if (!request_.streaming) return false;
  return std::any_of(
      samples_.begin(), samples_.end(),
      [this](const Sample& sample) { return HasNewData(sample); });
}

size_t KserveAnswer::waiting_bytes() const {
  if (!HasResponse()) return 0;
  size_t bytes = 0;
  for (const Sample& sample : samples_) {
    bytes += sample.new_text.size() + sample.new_logprobs_json.size() +
             sample.new_ids.size() * sizeof(int32_t) +
             sample.new_logprobs.size() * sizeof(float);
  }
  return bytes;
}

ModelInferResponse KserveAnswer::NewResponse(bool is_final) const {
  ModelInferResponse response;
  response.set_model_name(request_.model_name);
  response.set_model_version(kKserveModelVersion);
  response.set_id(request_.id);
  if (context_.in_stream) {
    // Clients require this parameter, so set it even if it is false.
    (*response.mutable_parameters())[kFinalResponseParameter].set_bool_param(
        is_final);
  }
  return response;
}

ModelInferResponse KserveAnswer::Take() {
  // After the end, a sample needs a response even if only log probabilities or
  // counts are left.
  const bool at_end = finished();
  const auto has_data = [this, at_end](const Sample& sample) {
    return at_end ? HasNewOutputs(sample) : HasNewData(sample);
  };
  const auto with_data =
      std::count_if(samples_.begin(), samples_.end(), has_data);
  // In a TensorRT-LLM stream, each response has one sample (`alone`). In all
  // other answers, each response has all samples.
  const bool alone = IsTrt() && request_.streaming;
  const bool is_final = at_end && !(alone && with_data > 1);
  complete_ = is_final;
  ModelInferResponse response = NewResponse(is_final);
  if (is_final && with_data == 0 && request_.streaming &&
      request_.wants_empty_final && !request_.outputs.finish_reason) {
    return response;
  }
  size_t first = 0;
  size_t count = samples_.size();
  if (alone) {
    count = 1;
    const auto found = std::find_if(samples_.begin(), samples_.end(), has_data);
    if (found != samples_.end()) {
      first = static_cast<size_t>(found - samples_.begin());
    }
  }
  if (IsTrt()) {
    AddTrtOutputs(first, count, &response);
  } else {
    AddVllmOutputs(&response);
  }
  for (size_t i = first; i < first + count; ++i) {
    Sample& sample = samples_[i];
    sample.new_text.clear();
    sample.new_ids.clear();
    sample.new_logprobs.clear();
    sample.new_logprobs_json.clear();
    sample.num_new_tokens = 0;
  }
  return response;
}

std::vector<std::string> KserveAnswer::Texts(size_t first, size_t count) const {
  std::vector<std::string> texts;
  for (size_t i = first; i < first + count; ++i) {
    const std::string& text = samples_[i].new_text;
    texts.push_back(request_.prepend_prompt ? request_.text + text : text);
  }
  return texts;
}

void KserveAnswer::AddVllmOutputs(ModelInferResponse* response) const {
  const KserveOutputs& outputs = request_.outputs;
  const Shape shape = {static_cast<int64_t>(samples_.size())};
  if (outputs.text_output) {
    AddStrings("text_output", Texts(0, samples_.size()), response);
  }
  std::vector<std::string> reasons;
  std::vector<std::string> logprobs;
  std::vector<float> cumulative;
  std::vector<uint32_t> counts;
  for (const Sample& sample : samples_) {
    // While a sample runs, Triton's vLLM backend, which defined this schema,
    // sends "None".
    reasons.push_back(sample.finish_reason.empty() ? "None"
                                                   : sample.finish_reason);
    logprobs.push_back(request_.sampling.has_logprobs()
                           ? absl::StrCat("[", sample.new_logprobs_json, "]")
                           : "null");
    cumulative.push_back(static_cast<float>(sample.cumulative_logprob));
    counts.push_back(sample.num_new_tokens);
  }
  if (outputs.finish_reason) AddStrings("finish_reason", reasons, response);
  if (outputs.cumulative_logprob) {
    AddNumbers("cumulative_logprob", shape, cumulative, response);
  }
  if (outputs.logprobs) AddStrings("logprobs", logprobs, response);
  if (outputs.num_input_tokens) {
    AddNumbers("num_input_tokens", {1},
               std::vector<uint32_t>{
                   static_cast<uint32_t>(context_.prompt.size_tokens())},
               response);
  }
  if (outputs.num_output_tokens) {
    AddNumbers("num_output_tokens", shape, counts, response);
  }
}

void KserveAnswer::AddTrtIds(size_t first, size_t count,
                             ModelInferResponse* response) const {
  std::vector<int32_t> prompt;
  if (request_.prepend_prompt && request_.schema == KserveSchema::kTrtTokens) {
    prompt = context_.prompt.ToIds();
  }
  size_t longest = 0;
  std::vector<int32_t> lengths;
  for (size_t i = first; i < first + count; ++i) {
    const size_t length = prompt.size() + samples_[i].new_ids.size();
    longest = std::max(longest, length);
    lengths.push_back(static_cast<int32_t>(length));
  }
  std::vector<int32_t> ids;
  for (size_t i = first; i < first + count; ++i) {
    ids.insert(ids.end(), prompt.begin(), prompt.end());
    ids.insert(ids.end(), samples_[i].new_ids.begin(),
               samples_[i].new_ids.end());
    ids.resize((i - first + 1) * longest, request_.pad_id);
  }
  const auto n = static_cast<int64_t>(count);
  if (request_.outputs.output_ids) {
    AddNumbers("output_ids", {1, n, static_cast<int64_t>(longest)}, ids,
               response);
  }
  if (request_.outputs.sequence_length) {
    AddNumbers("sequence_length", {1, n}, lengths, response);
  }
}

void KserveAnswer::AddTrtLogprobs(size_t first, size_t count,
                                  ModelInferResponse* response) const {
  size_t longest = 0;
  std::vector<float> cumulative;
  for (size_t i = first; i < first + count; ++i) {
    longest = std::max(longest, samples_[i].new_logprobs.size());
    cumulative.push_back(static_cast<float>(samples_[i].cumulative_logprob));
  }
  std::vector<float> values;
  for (size_t i = first; i < first + count; ++i) {
    values.insert(values.end(), samples_[i].new_logprobs.begin(),
                  samples_[i].new_logprobs.end());
    values.resize((i - first + 1) * longest, 0.0f);
  }
  const auto n = static_cast<int64_t>(count);
  if (request_.outputs.cum_log_probs) {
    AddNumbers("cum_log_probs", {1, n}, cumulative, response);
  }
  if (request_.outputs.output_log_probs) {
    AddNumbers("output_log_probs", {1, n, static_cast<int64_t>(longest)},
               values, response);
  }
}

void KserveAnswer::AddTrtOutputs(size_t first, size_t count,
                                 ModelInferResponse* response) const {
  const KserveOutputs& outputs = request_.outputs;
  const auto n = static_cast<int64_t>(count);
  // The text comes first, because some clients read only the first output.
  if (outputs.text_output) {
    AddStrings("text_output", Texts(first, count), response);
  }
  AddTrtIds(first, count, response);
  AddTrtLogprobs(first, count, response);
  std::vector<int32_t> indexes;
  std::vector<int32_t> counts;
  for (size_t i = first; i < first + count; ++i) {
    indexes.push_back(static_cast<int32_t>(i));
    counts.push_back(static_cast<int32_t>(samples_[i].num_new_tokens));
  }
  if (outputs.sequence_index) {
    AddNumbers("sequence_index", {1, n}, indexes, response);
  }
  if (outputs.batch_index) {
    AddNumbers("batch_index", {1, 1}, std::vector<int32_t>{0}, response);
  }
  if (outputs.num_input_tokens) {
    AddNumbers("num_input_tokens", {1, 1},
               std::vector<int32_t>{
                   static_cast<int32_t>(context_.prompt.size_tokens())},
               response);
  }
  if (outputs.num_output_tokens) {
    AddNumbers("num_output_tokens", {1, n}, counts, response);
  }
}

ModelInferResponse EmptyFinalResponse(const std::string& model_name,
                                      const std::string& id) {
  ModelInferResponse response;
  response.set_model_name(model_name);
  response.set_model_version(kKserveModelVersion);
  response.set_id(id);
  (*response.mutable_parameters())[kFinalResponseParameter].set_bool_param(
      true);
  return response;
}

}  // namespace kvasir::router
