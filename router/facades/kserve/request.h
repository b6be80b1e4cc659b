// Parses a ModelInferRequest in any of the schemas that clients use, into the
// engine's parameters and the form of the answer. No gRPC, no tokenizer.
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

// A request's tensors determine its schema, so that one model name serves all
// of them:
//   `stop` is true                      -> kStop
//   `input_ids`                         -> kTrtTokens
//   `text_input` and one of TensorRT-LLM's own tensors (max_tokens, top_k,
//   stop_words, ...)                    -> kTrtText
//   `text_input`                        -> kVllmText
enum class KserveSchema {
  // Triton's vLLM backend: sampling parameters as a JSON string.
  kVllmText,
  // TensorRT-LLM's ensemble: one tensor for each parameter.
  kTrtText,
  // TensorRT-LLM's engine: token ids in and out.
  kTrtTokens,
  // Ends the request of the same id.
  kStop,
};

// Output tensors that the client's flags and its list of outputs request.
struct KserveOutputs {
  bool text_output = false;
  bool output_ids = false;
  bool sequence_length = false;
  bool finish_reason = false;
  // vLLM's names: one number and one JSON text for each sample.
  bool cumulative_logprob = false;
  bool logprobs = false;
  // TensorRT-LLM's names.
  bool cum_log_probs = false;
  bool output_log_probs = false;
  bool sequence_index = false;
  bool batch_index = false;
  bool num_input_tokens = false;
  bool num_output_tokens = false;
};

// The tensor that selects kStop.
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
  // Still to be tokenized: a word of one token is never sampled, a longer one
  // is refused.
  std::vector<std::string> bad_words;
  // A TensorRT-LLM end_id replaces the model's own end tokens.
  bool replaces_eos = false;
  int32_t pad_id = 0;
  bool skip_special_tokens = true;

  // Many responses with new output, or one with everything.
  bool streaming = false;
  // The prompt comes before the output. Never when streaming.
  bool prepend_prompt = false;
  // If no data is left, the client wants a last response without outputs.
  bool wants_empty_final = false;
  KserveOutputs outputs;
};

// Added to the logit of a banned token. Finite, so that no arithmetic on it
// gives NaN, and below any difference of real logits.
inline constexpr float kBannedTokenBias = -1e9f;

// The most bad words of a request, because each is tokenized. Workers accept
// this many logit biases.
inline constexpr size_t kMaxBadWords = 1024;

// `unary`: the call is ModelInfer, which has one response. `streaming` is then
// false whatever the tensors say, but the prompt is left out as if it were
// true.
//
// INVALID_ARGUMENT names the tensor or parameter, the wanted and the given
// value. UNIMPLEMENTED names something that would change the result and is not
// built; its neutral values (beam_width 1, bad_words [""], ...) are accepted.
absl::StatusOr<KserveRequest> ParseKserveRequest(
    const inference::ModelInferRequest& request, bool unary);

// The tensors of the schemas: ModelMetadata and ModelConfig list them, they
// determine a request's schema, and clients may request them.
struct KserveTensorSpec {
  const char* name;
  const char* datatype;
  // -1: any number of elements.
  std::vector<int64_t> shape;
};
struct KserveInputSpec : KserveTensorSpec {
  // Only TensorRT-LLM's text schema has it.
  bool marks_trt_text = false;
};
struct KserveOutputSpec : KserveTensorSpec {
  bool KserveOutputs::*flag;
};
const std::vector<KserveInputSpec>& KserveInputSpecs();
const std::vector<KserveOutputSpec>& KserveOutputSpecs();

}  // namespace kvasir::router
