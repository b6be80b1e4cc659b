#include "router/facades/kserve/sampling.h"

#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "model/files/json.h"

namespace kvasir::router {
namespace {

using Json = nlohmann::json;

constexpr char kEvictionBudget[] = "eviction_budget";

constexpr int kMaxShownBytes = 60;
// 2^53: a double cannot represent every larger integer exactly.
constexpr double kMaxExactInteger = 9007199254740992.0;

// Limits of JSON texts. No valid object has more than 8 levels, and the JSON
// library copies and prints values recursively. The number of values is limited
// because each takes about a hundred bytes of memory.
constexpr model::JsonLimits kJsonLimits = {.max_depth = 8, .max_values = 16384};

// Parses a JSON text. Returns an error for JSON that exceeds kJsonLimits, and a
// value with is_discarded() for text that is not JSON. The limits are not
// checked in a callback of Json::parse, because that would take quadratic time.
absl::StatusOr<Json> ParseJsonText(const std::string& text,
                                   const std::string& where) {
  KVASIR_RETURN_IF_ERROR(model::CheckJsonShape(text, where, kJsonLimits));
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

// Returns a parameter's value for an error text, cut to kMaxShownBytes.
std::string Shown(const Json& value) {
  std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  if (text.size() > kMaxShownBytes) {
    text.resize(kMaxShownBytes);
    text += "...";
  }
  return text;
}

absl::Status ValueError(const std::string& name, const std::string& want,
                        const Json& have) {
  return absl::InvalidArgumentError(absl::StrCat(
      "sampling parameter '", name, "': want ", want, ", have ", Shown(have)));
}

absl::Status NotBuilt(const std::string& name, const std::string& detail = "") {
  return absl::UnimplementedError(absl::StrCat("sampling parameter '", name,
                                               "'", detail.empty() ? "" : " ",
                                               detail, " is not implemented"));
}

absl::StatusOr<double> AsNumber(const std::string& name, const Json& value) {
  double number = 0;
  if (value.is_number()) {
    number = value.get<double>();
  } else if (!value.is_string() ||
             !absl::SimpleAtod(value.get_ref<const std::string&>(), &number)) {
    return ValueError(name, "a number", value);
  }
  // This form of the condition also refuses NaN.
  if (!(std::abs(number) <= std::numeric_limits<float>::max())) {
    return ValueError(name, "a finite number", value);
  }
  return number;
}

// Reads an integer in [low, high]. Errors do not name `high`, because it is
// only a technical limit: the largest int32 or, for the seed, the largest
// int64.
absl::StatusOr<int64_t> AsInt(const std::string& name, const Json& value,
                              int64_t low, int64_t high) {
  constexpr char kSmaller[] = "a smaller integer";
  int64_t integer = 0;
  if (value.is_number_unsigned() &&
      value.get<uint64_t>() >
          static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
    return ValueError(name, kSmaller, value);
  }
  if (value.is_number_integer()) {
    integer = value.get<int64_t>();
  } else if (!value.is_string() ||
             !absl::SimpleAtoi(value.get_ref<const std::string&>(), &integer)) {
    double large = 0;
    if (value.is_number()) large = value.get<double>();
    if (value.is_string()) {
      (void)absl::SimpleAtod(value.get_ref<const std::string&>(), &large);
    }
    if (std::isfinite(large) && large > kMaxExactInteger) {
      return ValueError(name, kSmaller, value);
    }
    KVASIR_ASSIGN_OR_RETURN(const double number, AsNumber(name, value));
    if (number != std::floor(number) || number < -kMaxExactInteger) {
      return ValueError(name, "an integer", value);
    }
    integer = static_cast<int64_t>(number);
  }
  if (integer < low) {
    return ValueError(name, absl::StrCat("an integer of at least ", low),
                      value);
  }
  if (integer > high) return ValueError(name, kSmaller, value);
  return integer;
}

absl::StatusOr<bool> AsBool(const std::string& name, const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer() &&
      (value.get<int64_t>() == 0 || value.get<int64_t>() == 1)) {
    return value.get<int64_t>() == 1;
  }
  bool flag = false;
  if (value.is_string() &&
      absl::SimpleAtob(value.get_ref<const std::string&>(), &flag)) {
    return flag;
  }
  return ValueError(name, "true or false", value);
}

// Returns the JSON array or object in a string, if there is one; otherwise
// `value` itself.
Json Unquoted(const Json& value) {
  if (!value.is_string()) return value;
  const std::string& text = value.get_ref<const std::string&>();
  if (text.empty() || (text[0] != '[' && text[0] != '{')) return value;
  // A text that exceeds kJsonLimits stays a string. Its parameter then
  // refuses it.
  const absl::StatusOr<Json> inner = ParseJsonText(text, "");
  return !inner.ok() || inner->is_discarded() ? value : *inner;
}

absl::StatusOr<std::vector<std::string>> AsStrings(const std::string& name,
                                                   const Json& value) {
  const Json list = Unquoted(value);
  if (list.is_string()) {
    return std::vector<std::string>{list.get<std::string>()};
  }
  if (!list.is_array()) {
    return ValueError(name, "a string or a list of strings", value);
  }
  std::vector<std::string> strings;
  for (const Json& item : list) {
    if (!item.is_string()) {
      return ValueError(name, "a list of strings", value);
    }
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();

using Sampling = kvasir::v1::SamplingParams;
using Setter = std::function<absl::Status(
    const std::string& name, const Json& value, KserveRequest* request)>;

Setter Float(void (Sampling::*set)(float)) {
  return [set](const std::string& name, const Json& value,
               KserveRequest* request) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const double number, AsNumber(name, value));
    (request->sampling.*set)(static_cast<float>(number));
    return absl::OkStatus();
  };
}

Setter Count(void (Sampling::*set)(uint32_t), int64_t least) {
  return [set, least](const std::string& name, const Json& value,
                      KserveRequest* request) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(const int64_t count,
                            AsInt(name, value, least, kMaxInt32));
    (request->sampling.*set)(static_cast<uint32_t>(count));
    return absl::OkStatus();
  };
}

Setter Flag(bool KserveRequest::*flag) {
  return [flag](const std::string& name, const Json& value,
                KserveRequest* request) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(request->*flag, AsBool(name, value));
    return absl::OkStatus();
  };
}

Setter Words(std::vector<std::string> KserveRequest::*words) {
  return [words](const std::string& name, const Json& value,
                 KserveRequest* request) -> absl::Status {
    KVASIR_ASSIGN_OR_RETURN(request->*words, AsStrings(name, value));
    return absl::OkStatus();
  };
}

absl::Status SetStopTokenIds(const std::string& name, const Json& value,
                             KserveRequest* request) {
  const Json list = Unquoted(value);
  if (!list.is_array()) return ValueError(name, "a list of integers", value);
  for (const Json& item : list) {
    KVASIR_ASSIGN_OR_RETURN(const int64_t id, AsInt(name, item, 0, kMaxInt32));
    request->sampling.add_stop_token_ids(static_cast<int32_t>(id));
  }
  return absl::OkStatus();
}

absl::Status SetLogitBias(const std::string& name, const Json& value,
                          KserveRequest* request) {
  const Json object = Unquoted(value);
  if (!object.is_object()) {
    return ValueError(name, "an object that maps token ids to biases", value);
  }
  for (const auto& [key, bias] : object.items()) {
    int32_t id = 0;
    if (!absl::SimpleAtoi(key, &id) || id < 0) {
      return ValueError(name, "token ids as keys", Json(key));
    }
    KVASIR_ASSIGN_OR_RETURN(const double number, AsNumber(name, bias));
    (*request->sampling.mutable_logit_bias())[id] = static_cast<float>(number);
  }
  return absl::OkStatus();
}

absl::Status SetTopK(const std::string& name, const Json& value,
                     KserveRequest* request) {
  KVASIR_ASSIGN_OR_RETURN(const int64_t k, AsInt(name, value, -1, kMaxInt32));
  // In vLLM, -1 means that all tokens may be sampled. The engine's value for
  // this is 0.
  request->sampling.set_top_k(static_cast<int32_t>(k < 0 ? 0 : k));
  return absl::OkStatus();
}

absl::Status SetSeed(const std::string& name, const Json& value,
                     KserveRequest* request) {
  if (value.is_number_unsigned()) {
    request->seed = value.get<uint64_t>();
    return absl::OkStatus();
  }
  KVASIR_ASSIGN_OR_RETURN(
      const int64_t seed,
      AsInt(name, value, std::numeric_limits<int64_t>::min(),
            std::numeric_limits<int64_t>::max()));
  request->seed = static_cast<uint64_t>(seed);
  return absl::OkStatus();
}

absl::Status SetEvictionBudget(const std::string& name, const Json& value,
                               KserveRequest* request) {
  if (request->eviction_budget.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter '", name,
                     "' is set twice, as a request parameter and as a sampling "
                     "parameter: set only one of them"));
  }
  const std::string text =
      value.is_string() ? value.get<std::string>() : Shown(value);
  if (text == "none") {
    request->eviction_budget = {.ratio = 1};
    return absl::OkStatus();
  }
  const auto budget = proto::ParseEvictionBudget(text);
  if (!budget.ok()) {
    return ValueError(name,
                      "slots to keep (256), a share of the prompt above 0 "
                      "(0.2), or none to evict nothing",
                      value);
  }
  request->eviction_budget = *budget;
  return absl::OkStatus();
}

absl::Status SetIgnoreEos(const std::string& name, const Json& value,
                          KserveRequest* request) {
  KVASIR_ASSIGN_OR_RETURN(const bool ignore, AsBool(name, value));
  request->sampling.set_ignore_eos(ignore);
  return absl::OkStatus();
}

const std::map<std::string, Setter>& Setters() {
  static const auto& setters = *new std::map<std::string, Setter>{
      {"temperature", Float(&Sampling::set_temperature)},
      {"top_p", Float(&Sampling::set_top_p)},
      {"min_p", Float(&Sampling::set_min_p)},
      {"repetition_penalty", Float(&Sampling::set_repetition_penalty)},
      {"presence_penalty", Float(&Sampling::set_presence_penalty)},
      {"frequency_penalty", Float(&Sampling::set_frequency_penalty)},
      {"max_tokens", Count(&Sampling::set_max_tokens, 1)},
      {"min_tokens", Count(&Sampling::set_min_tokens, 0)},
      {"n", Count(&Sampling::set_n, 1)},
      {"logprobs", Count(&Sampling::set_logprobs, 0)},
      {"top_k", SetTopK},
      {"seed", SetSeed},
      {"stop", Words(&KserveRequest::stop_strings)},
      {"stop_token_ids", SetStopTokenIds},
      {"bad_words", Words(&KserveRequest::bad_words)},
      {"logit_bias", SetLogitBias},
      {"ignore_eos", SetIgnoreEos},
      {kEvictionBudget, SetEvictionBudget},
      {"include_stop_str_in_output", Flag(&KserveRequest::include_stop_string)},
      {"skip_special_tokens", Flag(&KserveRequest::skip_special_tokens)},
  };
  return setters;
}

// A parameter of vLLM that is not implemented. It is accepted only with the
// value that has no effect.
struct NeutralFlag {
  const char* name;
  bool neutral;
};
constexpr NeutralFlag kNeutralFlags[] = {
    {"use_beam_search", false}, {"early_stopping", false},
    {"detokenize", true},       {"spaces_between_special_tokens", true},
    {"skip_clone", false},      {"skip_reading_prefix_cache", false},
};

absl::Status CheckNotBuilt(const std::string& name, const Json& value) {
  for (const NeutralFlag& flag : kNeutralFlags) {
    if (name != flag.name) continue;
    KVASIR_ASSIGN_OR_RETURN(const bool have, AsBool(name, value));
    if (have == flag.neutral) return absl::OkStatus();
    return NotBuilt(name, have ? "true" : "false");
  }
  // This parameter only affects beam search, which is not implemented. So only
  // its type is checked.
  if (name == "length_penalty") return AsNumber(name, value).status();
  return NotBuilt(name);
}

absl::Status ApplyObject(const Json& object, KserveRequest* request) {
  std::optional<int64_t> best_of;
  for (const auto& [name, value] : object.items()) {
    if (value.is_null()) continue;  // null means the parameter's default
    if (name == "best_of") {
      KVASIR_ASSIGN_OR_RETURN(best_of, AsInt(name, value, 1, kMaxInt32));
      continue;
    }
    const auto setter = Setters().find(name);
    KVASIR_RETURN_IF_ERROR(setter != Setters().end()
                               ? setter->second(name, value, request)
                               : CheckNotBuilt(name, value));
  }
  if (best_of && *best_of != request->sampling.n()) {
    return NotBuilt("best_of",
                    absl::StrCat("other than n (want ", request->sampling.n(),
                                 ", have ", *best_of, ")"));
  }
  return absl::OkStatus();
}

Json ParameterValue(const inference::InferParameter& parameter) {
  switch (parameter.parameter_choice_case()) {
    case inference::InferParameter::kBoolParam:
      return parameter.bool_param();
    case inference::InferParameter::kInt64Param:
      return parameter.int64_param();
    case inference::InferParameter::kStringParam:
      return parameter.string_param();
    case inference::InferParameter::kDoubleParam:
      return parameter.double_param();
    case inference::InferParameter::kUint64Param:
      return parameter.uint64_param();
    case inference::InferParameter::PARAMETER_CHOICE_NOT_SET:
      break;
  }
  return nullptr;
}

}  // namespace

absl::Status ApplySamplingJson(const std::string& json_text,
                               KserveRequest* request) {
  if (json_text.size() > kMaxSamplingJsonBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("tensor 'sampling_parameters': want at most ",
                     kMaxSamplingJsonBytes, " bytes, have ", json_text.size()));
  }
  if (absl::StripAsciiWhitespace(json_text).empty()) return absl::OkStatus();
  KVASIR_ASSIGN_OR_RETURN(
      const Json object,
      ParseJsonText(json_text, "tensor 'sampling_parameters'"));
  if (!object.is_object()) {
    return absl::InvalidArgumentError(
        "tensor 'sampling_parameters': want a JSON object as text");
  }
  return ApplyObject(object, request);
}

absl::Status ApplySamplingParameters(
    const google::protobuf::Map<std::string, inference::InferParameter>&
        parameters,
    KserveRequest* request) {
  Json object = Json::object();
  for (const auto& [name, parameter] : parameters) {
    if (!IsRequestParameter(name)) object[name] = ParameterValue(parameter);
  }
  return ApplyObject(object, request);
}

absl::Status ApplyEvictionBudget(const inference::InferParameter& parameter,
                                 KserveRequest* request) {
  return SetEvictionBudget(kEvictionBudget, ParameterValue(parameter), request);
}

bool IsRequestParameter(const std::string& name) {
  static const char* const kNames[] = {
      "priority",           "timeout",
      "sequence_id",        "sequence_start",
      "sequence_end",       "Streaming",
      "binary_data_output", "triton_enable_empty_final_response",
      kEvictionBudget,
  };
  for (const char* known : kNames) {
    if (name == known) return true;
  }
  return false;
}

}  // namespace kvasir::router
