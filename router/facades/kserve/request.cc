#include "router/facades/kserve/request.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "router/base/canonical.h"
#include "router/facades/calls/stop_strings.h"
#include "router/facades/kserve/sampling.h"
#include "router/facades/kserve/tensors.h"

namespace kvasir::router {
namespace {

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
// The largest timeout, in microseconds. Workers receive the timeout as a uint32
// of milliseconds.
constexpr int64_t kMaxTimeoutUs =
    int64_t{std::numeric_limits<uint32_t>::max()} * 1000;

// Boolean tensors of TensorRT-LLM that ask for unsupported features. They must
// be false or absent.
constexpr const char* kRefusedFlags[] = {
    "return_context_logits", "return_generation_logits", "return_perf_metrics"};

// The names of those parameters that TensorRT-LLM's two schemas
// name differently.
struct TrtNames {
  const char* max_tokens;
  const char* top_k;
  const char* top_p;
  const char* length_penalty;
  const char* stream;
};
constexpr TrtNames kTextNames = {"max_tokens", "top_k", "top_p",
                                 "length_penalty", "stream"};
constexpr TrtNames kTokenNames = {"request_output_len", "runtime_top_k",
                                  "runtime_top_p", "len_penalty", "streaming"};

absl::Status NotBuilt(const std::string& what) {
  return absl::UnimplementedError(absl::StrCat(what, " is not implemented"));
}

absl::Status OutOfRange(const std::string& name, const std::string& want,
                        int64_t have) {
  return absl::InvalidArgumentError(
      absl::StrCat("tensor '", name, "': want ", want, ", have ", have));
}

// Reads an optional integer tensor, whose value must be within [low, high].
absl::StatusOr<std::optional<int64_t>> IntIn(KserveTensors* tensors,
                                             const std::string& name,
                                             int64_t low, int64_t high) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> value,
                          tensors->Int(name));
  // The second error does not name `high`, which is only the largest value of
  // the type.
  if (value && *value < low) {
    return OutOfRange(name, absl::StrCat("an integer of at least ", low),
                      *value);
  }
  if (value && *value > high) {
    return OutOfRange(name, "a smaller integer", *value);
  }
  return value;
}

absl::StatusOr<bool> BoolOr(KserveTensors* tensors, const std::string& name,
                            bool fallback) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> value, tensors->Bool(name));
  return value.value_or(fallback);
}

// A boolean input tensor and the output that it requests if it is true.
struct OutputFlag {
  const char* name;
  bool KserveOutputs::*output;
};
absl::Status ReadFlags(std::initializer_list<OutputFlag> flags,
                       KserveTensors* tensors, KserveOutputs* outputs) {
  for (const OutputFlag& flag : flags) {
    KVASIR_ASSIGN_OR_RETURN(outputs->*flag.output,
                            BoolOr(tensors, flag.name, false));
  }
  return absl::OkStatus();
}

absl::Status RefuseUnread(const KserveTensors& tensors, const char* schema) {
  const std::vector<std::string> unread = tensors.Unread();
  if (unread.empty()) return absl::OkStatus();
  return NotBuilt(absl::StrCat("tensor '", absl::StrJoin(unread, "', '"),
                               "' in the ", schema, " schema"));
}

absl::StatusOr<KserveSchema> ChooseSchema(KserveTensors* tensors) {
  KVASIR_ASSIGN_OR_RETURN(const bool stop,
                          BoolOr(tensors, kKserveStopTensor, false));
  if (stop) return KserveSchema::kStop;
  if (tensors->Has("input_ids")) {
    if (!tensors->Has("text_input")) return KserveSchema::kTrtTokens;
    return absl::InvalidArgumentError(
        "the request has both tensors 'text_input' and 'input_ids': send only "
        "one of them");
  }
  if (!tensors->Has("text_input")) {
    return absl::InvalidArgumentError(
        "the request has neither a tensor 'text_input' nor 'input_ids': send "
        "one of them");
  }
  const auto has = [tensors](const char* name) { return tensors->Has(name); };
  const bool trt =
      std::any_of(std::begin(kRefusedFlags), std::end(kRefusedFlags), has) ||
      std::any_of(KserveInputSpecs().begin(), KserveInputSpecs().end(),
                  [has](const KserveInputSpec& spec) {
                    return spec.marks_trt_text && has(spec.name);
                  });
  if (trt && tensors->Has("sampling_parameters")) {
    return absl::InvalidArgumentError(
        "the request has the tensor 'sampling_parameters' and separate tensors "
        "for parameters, such as 'max_tokens': send only one of the two kinds");
  }
  return trt ? KserveSchema::kTrtText : KserveSchema::kVllmText;
}

// The tensors `stream` and `streaming` mean the same. Some clients send the
// parameter `Streaming` instead. It counts only if neither tensor is present.
absl::StatusOr<bool> ParseStreaming(const inference::ModelInferRequest& request,
                                    KserveTensors* tensors) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> stream,
                          tensors->Bool("stream"));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> streaming,
                          tensors->Bool("streaming"));
  if (stream) return *stream;
  if (streaming) return *streaming;
  const auto parameter = request.parameters().find("Streaming");
  return parameter != request.parameters().end() &&
         parameter->second.bool_param();
}

absl::Status WantBoolParam(const std::string& name,
                           const inference::InferParameter& value) {
  if (value.parameter_choice_case() == inference::InferParameter::kBoolParam) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("parameter '", name, "': its value must be a bool_param"));
}

// Reads a parameter of type int64_param or uint64_param, from 0 to `high`.
absl::StatusOr<int64_t> IntParam(const std::string& name,
                                 const inference::InferParameter& value,
                                 int64_t high) {
  if (value.has_int64_param() && value.int64_param() >= 0 &&
      value.int64_param() <= high) {
    return value.int64_param();
  }
  if (value.has_uint64_param() &&
      value.uint64_param() <= static_cast<uint64_t>(high)) {
    return static_cast<int64_t>(value.uint64_param());
  }
  std::string have = "another kind of value";
  if (value.has_int64_param()) have = absl::StrCat(value.int64_param());
  if (value.has_uint64_param()) have = absl::StrCat(value.uint64_param());
  return absl::InvalidArgumentError(absl::StrCat(
      "parameter '", name, "': want an int64_param or uint64_param from 0 to ",
      high, ", have ", have));
}

absl::Status ParseParameters(const inference::ModelInferRequest& request,
                             KserveRequest* out) {
  for (const auto& [name, value] : request.parameters()) {
    if (name == "triton_enable_empty_final_response") {
      KVASIR_RETURN_IF_ERROR(WantBoolParam(name, value));
      out->wants_empty_final = value.bool_param();
    } else if (name == "Streaming") {
      // Only the type is checked here; ParseStreaming reads the value.
      KVASIR_RETURN_IF_ERROR(WantBoolParam(name, value));
    } else if (name == "priority") {
      KVASIR_ASSIGN_OR_RETURN(const int64_t priority,
                              IntParam(name, value, kMaxInt32));
      // In Triton, priority 1 is the highest and 0 means the default. Here both
      // become 0, the router's default, and higher values follow. So a request
      // can lower its own priority, but cannot overtake requests that set none.
      out->priority = priority == 0 ? 0 : static_cast<int32_t>(priority - 1);
    } else if (name == "timeout") {
      KVASIR_ASSIGN_OR_RETURN(const int64_t timeout_us,
                              IntParam(name, value, kMaxTimeoutUs));
      out->queue_timeout = absl::Microseconds(timeout_us);
    } else if (name == "eviction_budget") {
      KVASIR_RETURN_IF_ERROR(ApplyEvictionBudget(value, out));
    } else if (name == "sequence_id" || name == "sequence_start" ||
               name == "sequence_end") {
      return NotBuilt(absl::StrCat("parameter '", name,
                                   "' (sequences with state on the server)"));
    }
  }
  return absl::OkStatus();
}

// Refuses parameters other than those that all schemas have. Not called for a
// vLLM request without the tensor sampling_parameters, because its other
// parameters are the sampling parameters.
absl::Status RefuseOtherParameters(
    const inference::ModelInferRequest& request) {
  for (const auto& [name, value] : request.parameters()) {
    if (!IsRequestParameter(name)) {
      return NotBuilt(
          absl::StrCat("request parameter '", name,
                       "' together with tensors that set sampling parameters"));
    }
  }
  return absl::OkStatus();
}

using OutputList = std::initializer_list<bool KserveOutputs::*>;

constexpr OutputList kVllmOutputs = {
    &KserveOutputs::text_output,        &KserveOutputs::finish_reason,
    &KserveOutputs::cumulative_logprob, &KserveOutputs::logprobs,
    &KserveOutputs::num_input_tokens,   &KserveOutputs::num_output_tokens};
constexpr OutputList kTrtTextOutputs = {
    &KserveOutputs::text_output,      &KserveOutputs::cum_log_probs,
    &KserveOutputs::output_log_probs, &KserveOutputs::sequence_index,
    &KserveOutputs::batch_index,      &KserveOutputs::num_input_tokens,
    &KserveOutputs::num_output_tokens};
constexpr OutputList kTrtTokenOutputs = {
    &KserveOutputs::output_ids,       &KserveOutputs::sequence_length,
    &KserveOutputs::cum_log_probs,    &KserveOutputs::output_log_probs,
    &KserveOutputs::sequence_index,   &KserveOutputs::batch_index,
    &KserveOutputs::num_input_tokens, &KserveOutputs::num_output_tokens};

bool Gives(KserveSchema schema, bool KserveOutputs::*flag) {
  const OutputList& outputs = schema == KserveSchema::kVllmText ? kVllmOutputs
                              : schema == KserveSchema::kTrtText
                                  ? kTrtTextOutputs
                                  : kTrtTokenOutputs;
  return std::find(outputs.begin(), outputs.end(), flag) != outputs.end();
}

absl::StatusOr<std::vector<const KserveOutputSpec*>> ListedOutputs(
    const inference::ModelInferRequest& request) {
  const auto& specs = KserveOutputSpecs();
  std::vector<const KserveOutputSpec*> listed;
  for (const auto& output : request.outputs()) {
    for (const auto& [parameter, value] : output.parameters()) {
      return NotBuilt(absl::StrCat("output '", output.name(), "': parameter '",
                                   parameter, "'"));
    }
    const auto spec = std::find_if(specs.begin(), specs.end(),
                                   [&output](const KserveOutputSpec& known) {
                                     return output.name() == known.name;
                                   });
    if (spec == specs.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the requested output '", output.name(), "' is unknown"));
    }
    if (std::find(listed.begin(), listed.end(), &*spec) == listed.end()) {
      listed.push_back(&*spec);
    }
  }
  return listed;
}

// A client that lists outputs receives exactly these, whatever its tensors
// request. A listed output that the schema does not have is refused. As an
// exception, a list of all outputs in the model's metadata is ignored, because
// benchmark clients always send it.
absl::Status ChooseOutputs(const inference::ModelInferRequest& request,
                           KserveRequest* out) {
  if (request.outputs().empty()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(const std::vector<const KserveOutputSpec*> listed,
                          ListedOutputs(request));
  if (listed.size() == KserveOutputSpecs().size()) return absl::OkStatus();
  KserveOutputs outputs;
  for (const KserveOutputSpec* spec : listed) {
    if (!Gives(out->schema, spec->flag)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the requested output '", spec->name,
          "' does not exist for the kind of input tensors in this request"));
    }
    outputs.*spec->flag = true;
  }
  out->outputs = outputs;
  if (outputs.logprobs && !out->sampling.has_logprobs()) {
    out->sampling.set_logprobs(0);
  }
  return absl::OkStatus();
}

// Makes the engine compute the log probabilities that the requested
// outputs need.
void AskForLogprobs(KserveRequest* out) {
  const KserveOutputs& outputs = out->outputs;
  const bool wanted = outputs.cumulative_logprob || outputs.cum_log_probs ||
                      outputs.output_log_probs;
  if (wanted && !out->sampling.has_logprobs()) out->sampling.set_logprobs(0);
}

absl::Status ParseText(KserveTensors* tensors, KserveRequest* out) {
  KVASIR_ASSIGN_OR_RETURN(std::optional<std::string> text,
                          tensors->String("text_input"));
  if (!text)
    return absl::InvalidArgumentError("the request has no tensor 'text_input'");
  out->text = std::move(*text);
  return absl::OkStatus();
}

absl::Status ParseVllm(const inference::ModelInferRequest& request, bool unary,
                       KserveTensors* tensors, KserveRequest* out) {
  KVASIR_RETURN_IF_ERROR(ParseText(tensors, out));
  KVASIR_ASSIGN_OR_RETURN(const bool streaming,
                          ParseStreaming(request, tensors));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<bool> exclude,
                          tensors->Bool("exclude_input_in_output"));
  if (streaming && exclude == false) {
    return absl::InvalidArgumentError(
        "tensor 'exclude_input_in_output' is false, but must be true or absent "
        "in a streaming request");
  }
  out->streaming = streaming && !unary;
  out->prepend_prompt = !exclude.value_or(streaming);
  if (tensors->Has("sampling_parameters")) {
    KVASIR_RETURN_IF_ERROR(RefuseOtherParameters(request));
    KVASIR_ASSIGN_OR_RETURN(const std::optional<std::string> json_text,
                            tensors->String("sampling_parameters"));
    KVASIR_RETURN_IF_ERROR(ApplySamplingJson(json_text.value_or(""), out));
  } else {
    KVASIR_RETURN_IF_ERROR(ApplySamplingParameters(request.parameters(), out));
  }
  KserveOutputs& outputs = out->outputs;
  outputs.text_output = true;
  KVASIR_RETURN_IF_ERROR(ReadFlags(
      {{"return_finish_reason", &KserveOutputs::finish_reason},
       {"return_cumulative_logprob", &KserveOutputs::cumulative_logprob},
       {"return_logprobs", &KserveOutputs::logprobs},
       {"return_num_input_tokens", &KserveOutputs::num_input_tokens},
       {"return_num_output_tokens", &KserveOutputs::num_output_tokens}},
      tensors, &outputs));
  return RefuseUnread(*tensors, "vLLM");
}

absl::Status ParseSeed(KserveTensors* tensors, KserveRequest* out) {
  // Older clients send the tensor `random_seed` instead.
  for (const char* name : {"seed", "random_seed"}) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> seed,
                            tensors->Int(name));
    if (!seed) continue;
    if (out->seed && *out->seed != static_cast<uint64_t>(*seed)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tensors 'seed' and 'random_seed' differ: have ",
                       *out->seed, " and ", *seed));
    }
    out->seed = static_cast<uint64_t>(*seed);
  }
  return absl::OkStatus();
}

// As in TensorRT-LLM, top_p 0 means "not set". If neither top_k nor top_p is
// set, sampling is greedy.
absl::Status ParseTopKTopP(const TrtNames& names, KserveTensors* tensors,
                           KserveRequest* out) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> top_k,
                          IntIn(tensors, names.top_k, 0, kMaxInt32));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<double> top_p,
                          tensors->Float(names.top_p));
  const int64_t k = top_k.value_or(0);
  const double p = top_p.value_or(0.0);
  out->sampling.set_top_k(k == 0 && p == 0.0 ? 1 : static_cast<int32_t>(k));
  out->sampling.set_top_p(p == 0.0 ? 1.0f : static_cast<float>(p));
  return absl::OkStatus();
}

absl::Status ParsePenalties(KserveTensors* tensors, KserveRequest* out) {
  using Sampling = kvasir::v1::SamplingParams;
  struct Field {
    const char* name;
    void (Sampling::*set)(float);
  };
  for (const auto& [name, set] :
       {Field{"temperature", &Sampling::set_temperature},
        Field{"repetition_penalty", &Sampling::set_repetition_penalty},
        Field{"presence_penalty", &Sampling::set_presence_penalty},
        Field{"frequency_penalty", &Sampling::set_frequency_penalty}}) {
    KVASIR_ASSIGN_OR_RETURN(const std::optional<double> value,
                            tensors->Float(name));
    if (value) (out->sampling.*set)(static_cast<float>(*value));
  }
  return absl::OkStatus();
}

absl::Status ParseCounts(const TrtNames& names, KserveTensors* tensors,
                         KserveRequest* out) {
  kvasir::v1::SamplingParams& sampling = out->sampling;
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> max_tokens,
                          IntIn(tensors, names.max_tokens, 1, kMaxInt32));
  if (!max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("the request has no tensor '", names.max_tokens, "'"));
  }
  sampling.set_max_tokens(static_cast<uint32_t>(*max_tokens));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> min_tokens,
                          IntIn(tensors, "min_tokens", 0, kMaxInt32));
  sampling.set_min_tokens(static_cast<uint32_t>(min_tokens.value_or(0)));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> n,
                          IntIn(tensors, "num_return_sequences", 1, kMaxInt32));
  sampling.set_n(static_cast<uint32_t>(n.value_or(1)));
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> beam_width,
                          IntIn(tensors, "beam_width", 0, kMaxInt32));
  if (beam_width.value_or(1) > 1) {
    return NotBuilt(absl::StrCat(
        "tensor 'beam_width' with a value above 1 (have ", *beam_width, ")"));
  }
  // These tensors only affect beam search, which is not implemented. So only
  // their types are checked.
  KVASIR_RETURN_IF_ERROR(tensors->Float(names.length_penalty).status());
  KVASIR_RETURN_IF_ERROR(tensors->Float("beam_search_diversity_rate").status());
  return tensors->Bool("early_stopping").status();
}

// Reads `end_id`. -1 means that no token ends the output. Any other value
// replaces the model's own end tokens.
absl::Status ParseEndId(KserveTensors* tensors, KserveRequest* out) {
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> end_id,
                          IntIn(tensors, "end_id", -1, kMaxInt32));
  if (end_id) {
    out->replaces_eos = true;
    out->sampling.set_ignore_eos(true);
    if (*end_id >= 0) {
      out->sampling.add_stop_token_ids(static_cast<int32_t>(*end_id));
    }
  }
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> pad_id,
                          IntIn(tensors, "pad_id", -1, kMaxInt32));
  out->pad_id = static_cast<int32_t>(pad_id.value_or(0));
  return absl::OkStatus();
}

absl::Status ParseTrtOutputs(KserveTensors* tensors, KserveRequest* out) {
  for (const char* flag : kRefusedFlags) {
    KVASIR_ASSIGN_OR_RETURN(const bool on, BoolOr(tensors, flag, false));
    if (on)
      return NotBuilt(absl::StrCat("tensor '", flag, "' with the value true"));
  }
  KserveOutputs& outputs = out->outputs;
  KVASIR_RETURN_IF_ERROR(ReadFlags(
      {{"return_log_probs", &KserveOutputs::output_log_probs},
       {"return_num_input_tokens", &KserveOutputs::num_input_tokens},
       {"return_num_output_tokens", &KserveOutputs::num_output_tokens}},
      tensors, &outputs));
  outputs.cum_log_probs = outputs.output_log_probs;
  outputs.sequence_index = true;
  outputs.batch_index = true;
  return absl::OkStatus();
}

// Reads the tensors that both TensorRT-LLM schemas have.
absl::Status ParseTrtCommon(const inference::ModelInferRequest& request,
                            const TrtNames& names, bool unary,
                            KserveTensors* tensors, KserveRequest* out) {
  KVASIR_RETURN_IF_ERROR(RefuseOtherParameters(request));
  KVASIR_ASSIGN_OR_RETURN(const bool streaming,
                          ParseStreaming(request, tensors));
  KVASIR_ASSIGN_OR_RETURN(const bool exclude,
                          BoolOr(tensors, "exclude_input_in_output", false));
  out->streaming = streaming && !unary;
  out->prepend_prompt = !streaming && !exclude;
  KVASIR_RETURN_IF_ERROR(ParseCounts(names, tensors, out));
  KVASIR_RETURN_IF_ERROR(ParseTopKTopP(names, tensors, out));
  KVASIR_RETURN_IF_ERROR(ParsePenalties(tensors, out));
  KVASIR_RETURN_IF_ERROR(ParseSeed(tensors, out));
  KVASIR_RETURN_IF_ERROR(ParseEndId(tensors, out));
  return ParseTrtOutputs(tensors, out);
}

// Removes empty strings, which clients use to pad word lists.
std::vector<std::string> WithoutEmpty(std::vector<std::string> words) {
  words.erase(std::remove(words.begin(), words.end(), ""), words.end());
  return words;
}

absl::Status ParseTrtText(const inference::ModelInferRequest& request,
                          bool unary, KserveTensors* tensors,
                          KserveRequest* out) {
  KVASIR_RETURN_IF_ERROR(ParseText(tensors, out));
  KVASIR_RETURN_IF_ERROR(
      ParseTrtCommon(request, kTextNames, unary, tensors, out));
  KVASIR_ASSIGN_OR_RETURN(out->stop_strings, tensors->Strings("stop_words"));
  out->stop_strings = WithoutEmpty(std::move(out->stop_strings));
  KVASIR_ASSIGN_OR_RETURN(out->bad_words, tensors->Strings("bad_words"));
  out->bad_words = WithoutEmpty(std::move(out->bad_words));
  out->outputs.text_output = true;
  return RefuseUnread(*tensors, "TensorRT-LLM text");
}

// Reads a list of words that are given as token ids. Row 0 has the ids of all
// words, one word after the other. Row 1 has the index in row 0 at which each
// word ends, and is padded with -1. Every word must be a single token.
absl::StatusOr<std::vector<int32_t>> ParseSingleTokenWords(
    KserveTensors* tensors, const std::string& name) {
  KVASIR_ASSIGN_OR_RETURN(const auto rows, tensors->TwoRows(name));
  std::vector<int32_t> ids;
  if (rows.empty()) return ids;
  int64_t begin = 0;
  for (const int64_t end : rows[1]) {
    if (end < 0) break;
    if (end <= begin || end > static_cast<int64_t>(rows[0].size())) {
      return OutOfRange(
          name,
          absl::StrCat("increasing end indices of words in row 1, from 1 to ",
                       rows[0].size()),
          end);
    }
    if (end - begin > 1) {
      return NotBuilt(absl::StrCat("tensor '", name, "' with a word of ",
                                   end - begin, " tokens instead of 1"));
    }
    const int64_t id = rows[0][static_cast<size_t>(begin)];
    if (id < 0 || id > kMaxInt32) {
      return OutOfRange(name, "token ids of 0 or more", id);
    }
    ids.push_back(static_cast<int32_t>(id));
    begin = end;
  }
  return ids;
}

absl::Status ParseInputIds(KserveTensors* tensors, KserveRequest* out) {
  const int64_t count = tensors->NumElements("input_ids");
  KVASIR_ASSIGN_OR_RETURN(const std::optional<int64_t> length,
                          tensors->Int("input_lengths"));
  if (length && (*length < 0 || *length > count)) {
    return OutOfRange(
        "input_lengths",
        absl::StrCat("0 to ", count, " (the number of input_ids)"), *length);
  }
  // The ids from index `length` on are padding.
  KVASIR_ASSIGN_OR_RETURN(
      out->token_ids, tensors->TokenIds("input_ids", length.value_or(count)));
  return absl::OkStatus();
}

absl::Status ParseTrtTokens(const inference::ModelInferRequest& request,
                            bool unary, KserveTensors* tensors,
                            KserveRequest* out) {
  KVASIR_RETURN_IF_ERROR(ParseInputIds(tensors, out));
  KVASIR_RETURN_IF_ERROR(
      ParseTrtCommon(request, kTokenNames, unary, tensors, out));
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> stops,
                          ParseSingleTokenWords(tensors, "stop_words_list"));
  for (const int32_t id : stops) out->sampling.add_stop_token_ids(id);
  KVASIR_ASSIGN_OR_RETURN(const std::vector<int32_t> bad,
                          ParseSingleTokenWords(tensors, "bad_words_list"));
  for (const int32_t id : bad) {
    (*out->sampling.mutable_logit_bias())[id] = kBannedTokenBias;
  }
  out->outputs.output_ids = true;
  out->outputs.sequence_length = true;
  return RefuseUnread(*tensors, "TensorRT-LLM token");
}

absl::Status CheckCount(const char* what, int64_t have) {
  if (have <= kMaxKserveNames) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": want at most ", kMaxKserveNames, ", have ", have));
}

absl::Status CheckCounts(const inference::ModelInferRequest& request) {
  KVASIR_RETURN_IF_ERROR(CheckCount("inputs", request.inputs_size()));
  KVASIR_RETURN_IF_ERROR(CheckCount("outputs", request.outputs_size()));
  return CheckCount("parameters",
                    static_cast<int64_t>(request.parameters().size()));
}

absl::Status CheckBadWords(const KserveRequest& request) {
  if (request.bad_words.size() <= kMaxBadWords) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("bad_words: want at most ",
                                                 kMaxBadWords, " words, have ",
                                                 request.bad_words.size()));
}

}  // namespace

absl::StatusOr<KserveRequest> ParseKserveRequest(
    const inference::ModelInferRequest& request, bool unary) {
  KVASIR_RETURN_IF_ERROR(CheckCounts(request));
  KserveRequest out;
  out.model_name = request.model_name();
  out.model_version = request.model_version();
  out.id = request.id();
  out.sampling = NeutralSampling();
  KVASIR_ASSIGN_OR_RETURN(KserveTensors tensors,
                          KserveTensors::Create(request));
  KVASIR_RETURN_IF_ERROR(ParseParameters(request, &out));
  KVASIR_ASSIGN_OR_RETURN(out.schema, ChooseSchema(&tensors));
  switch (out.schema) {
    case KserveSchema::kStop:
      return out;  // the other tensors of a stop request are placeholders
    case KserveSchema::kVllmText:
      KVASIR_RETURN_IF_ERROR(ParseVllm(request, unary, &tensors, &out));
      break;
    case KserveSchema::kTrtText:
      KVASIR_RETURN_IF_ERROR(ParseTrtText(request, unary, &tensors, &out));
      break;
    case KserveSchema::kTrtTokens:
      KVASIR_RETURN_IF_ERROR(ParseTrtTokens(request, unary, &tensors, &out));
      break;
  }
  KVASIR_RETURN_IF_ERROR(CheckStopStrings(
      out.schema == KserveSchema::kTrtText ? "stop_words" : "stop",
      out.stop_strings));
  KVASIR_RETURN_IF_ERROR(CheckBadWords(out));
  KVASIR_RETURN_IF_ERROR(ChooseOutputs(request, &out));
  AskForLogprobs(&out);
  return out;
}

const std::vector<KserveInputSpec>& KserveInputSpecs() {
  constexpr bool kMarksTrtText = true;
  static const auto& specs = *new std::vector<KserveInputSpec>{
      {{"text_input", "BYTES", {1}}},
      {{"input_ids", "INT32", {-1}}},
      {{"input_lengths", "INT32", {1}}},
      {{"stream", "BOOL", {1}}},
      {{"streaming", "BOOL", {1}}},
      {{kKserveStopTensor, "BOOL", {1}}},
      {{"exclude_input_in_output", "BOOL", {1}}},
      {{"sampling_parameters", "BYTES", {1}}},
      {{"max_tokens", "INT32", {1}}, kMarksTrtText},
      {{"request_output_len", "INT32", {1}}},
      {{"min_tokens", "INT32", {1}}, kMarksTrtText},
      {{"num_return_sequences", "INT32", {1}}, kMarksTrtText},
      {{"beam_width", "INT32", {1}}, kMarksTrtText},
      {{"end_id", "INT32", {1}}, kMarksTrtText},
      {{"pad_id", "INT32", {1}}, kMarksTrtText},
      {{"stop_words", "BYTES", {-1}}, kMarksTrtText},
      {{"bad_words", "BYTES", {-1}}, kMarksTrtText},
      {{"stop_words_list", "INT32", {2, -1}}},
      {{"bad_words_list", "INT32", {2, -1}}},
      {{"temperature", "FP32", {1}}, kMarksTrtText},
      {{"top_k", "INT32", {1}}, kMarksTrtText},
      {{"top_p", "FP32", {1}}, kMarksTrtText},
      {{"runtime_top_k", "INT32", {1}}},
      {{"runtime_top_p", "FP32", {1}}},
      {{"length_penalty", "FP32", {1}}, kMarksTrtText},
      {{"len_penalty", "FP32", {1}}},
      {{"repetition_penalty", "FP32", {1}}, kMarksTrtText},
      {{"presence_penalty", "FP32", {1}}, kMarksTrtText},
      {{"frequency_penalty", "FP32", {1}}, kMarksTrtText},
      {{"seed", "UINT64", {1}}, kMarksTrtText},
      {{"random_seed", "UINT64", {1}}, kMarksTrtText},
      {{"return_log_probs", "BOOL", {1}}, kMarksTrtText},
      {{"return_finish_reason", "BOOL", {1}}},
      {{"return_cumulative_logprob", "BOOL", {1}}},
      {{"return_logprobs", "BOOL", {1}}},
      {{"return_num_input_tokens", "BOOL", {1}}},
      {{"return_num_output_tokens", "BOOL", {1}}},
  };
  return specs;
}

const std::vector<KserveOutputSpec>& KserveOutputSpecs() {
  static const auto& specs = *new std::vector<KserveOutputSpec>{
      {{"text_output", "BYTES", {-1}}, &KserveOutputs::text_output},
      {{"finish_reason", "BYTES", {-1}}, &KserveOutputs::finish_reason},
      {{"cumulative_logprob", "FP32", {-1}},
       &KserveOutputs::cumulative_logprob},
      {{"logprobs", "BYTES", {-1}}, &KserveOutputs::logprobs},
      {{"output_ids", "INT32", {-1, -1, -1}}, &KserveOutputs::output_ids},
      {{"sequence_length", "INT32", {-1, -1}}, &KserveOutputs::sequence_length},
      {{"cum_log_probs", "FP32", {-1, -1}}, &KserveOutputs::cum_log_probs},
      {{"output_log_probs", "FP32", {-1, -1, -1}},
       &KserveOutputs::output_log_probs},
      {{"sequence_index", "INT32", {1, 1}}, &KserveOutputs::sequence_index},
      {{"batch_index", "INT32", {1, 1}}, &KserveOutputs::batch_index},
      {{"num_input_tokens", "UINT32", {-1}}, &KserveOutputs::num_input_tokens},
      {{"num_output_tokens", "UINT32", {-1}},
       &KserveOutputs::num_output_tokens},
  };
  return specs;
}

}  // namespace kvasir::router
