// Parses a ModelInferRequest in any of the schemas that clients use. The result
// has the engine's parameters and the list of wanted outputs. Uses no gRPC and
// no tokenizer.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/eviction_budget.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"

namespace kvasir::router {

// A schema is the set of tensors that one kind of client uses. A request's
// tensors determine its schema, so that clients of all kinds can use the same
// model name:
//   `stop` is true                      -> kStop
//   `input_ids`                         -> kTrtTokens
//   `text_input` and one of TensorRT-LLM's own tensors (max_tokens, top_k,
//   stop_words, ...)                    -> kTrtText
//   `text_input`                        -> kVllmText
enum class KserveSchema {
  // The schema of Triton's vLLM backend: text, with the sampling parameters as
  // a JSON string.
  kVllmText,
  // The schema of TensorRT-LLM's ensemble: text, with a tensor for
  // each parameter.
  kTrtText,
  // The schema of TensorRT-LLM's engine: token ids as input and output.
  kTrtTokens,
  // A request that ends the running request with the same id.
  kStop,
};

// The output tensors that a client requests, either by boolean input tensors or
// by a list of outputs.
struct KserveOutputs {
  bool text_output = false;
  bool output_ids = false;
  bool sequence_length = false;
  bool finish_reason = false;
  // The names of the next two outputs are those of vLLM's schema. For each
  // sample, cumulative_logprob is a number and logprobs is a JSON text.
  bool cumulative_logprob = false;
  bool logprobs = false;
  // The names of the other outputs are those of TensorRT-LLM's schemas.
  bool cum_log_probs = false;
  bool output_log_probs = false;
  bool sequence_index = false;
  bool batch_index = false;
  bool num_input_tokens = false;
  bool num_output_tokens = false;
};

// If the request's tensor with this name is true, its schema is kStop.
inline constexpr char kKserveStopTensor[] = "stop";

struct KserveRequest {
  KserveSchema schema = KserveSchema::kVllmText;
  std::string model_name;
  std::string model_version;
  std::string id;

  // The prompt: text in the text schemas, ids in kTrtTokens.
  std::string text;
  proto::TokenBytes token_ids;

  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  int32_t priority = 0;
  std::optional<proto::EvictionBudget> eviction_budget;
  absl::Duration queue_timeout = absl::ZeroDuration();

  std::vector<std::string> stop_strings;
  bool include_stop_string = false;
  // Words that must not be in the output. They are tokenized later. If a word
  // is one token, its logit gets kBannedTokenBias. A longer word is refused.
  std::vector<std::string> bad_words;
  // If true, the tensor end_id replaces the model's own end tokens.
  bool replaces_eos = false;
  int32_t pad_id = 0;
  bool skip_special_tokens = true;

  // If true, the answer has many responses, each with new output. If false, it
  // has one response with the whole output.
  bool streaming = false;
  // If true, the text output begins with the prompt. False whenever `streaming`
  // is true.
  bool prepend_prompt = false;
  // If true, and no output is left for the last response of a stream, that
  // response has no output tensors.
  bool wants_empty_final = false;
  KserveOutputs outputs;
};

// The bias that is added to the logit of a banned token. It is far larger than
// any difference between real logits, but finite, so that calculations with it
// do not give NaN.
inline constexpr float kBannedTokenBias = -1e9f;

// The most bad words in a request. Each becomes a logit bias, and workers
// accept only this many.
inline constexpr size_t kMaxBadWords = 1024;

// `unary` is true for ModelInfer, which has a single response. Then the
// result's `streaming` is false. But if the tensors ask for streaming,
// `prepend_prompt` is false, as it would be in a stream.
// Errors: INVALID_ARGUMENT names the tensor or parameter, the allowed values
// and the given one. UNIMPLEMENTED names a feature that is not implemented and
// would change the result. Values that leave such a feature off (beam_width 1,
// bad_words [""], ...) are accepted.
absl::StatusOr<KserveRequest> ParseKserveRequest(
    const inference::ModelInferRequest& request, bool unary);

// An input or output tensor of the schemas. ModelMetadata and ModelConfig list
// all of them.
struct KserveTensorSpec {
  const char* name;
  const char* datatype;
  // -1 stands for any number of elements.
  std::vector<int64_t> shape;
};
struct KserveInputSpec : KserveTensorSpec {
  // True if only TensorRT-LLM's text schema has this tensor. So a text request
  // with this tensor uses that schema.
  bool marks_trt_text = false;
};
struct KserveOutputSpec : KserveTensorSpec {
  bool KserveOutputs::*flag;
};
const std::vector<KserveInputSpec>& KserveInputSpecs();
const std::vector<KserveOutputSpec>& KserveOutputSpecs();

}  // namespace kvasir::router
