// A ModelInferRequest in any of the schemas that clients speak, as what is
// wanted from the engine and how to answer. No gRPC, no tokenizer.
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

// Which schema a request speaks is told by its tensors alone, so one model
// name serves all of them:
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

// Tensors of an answer that the client's flags and its list of outputs ask for.
struct KserveOutputs {
  bool text_output = false;
  bool output_ids = false;
  bool sequence_length = false;
  bool finish_reason = false;
  // vLLM's names: one number, and one JSON text, for each sample.
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

// The tensor that tells kStop.
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
  // To be turned into token ids: a word of one token is never sampled, a
  // longer one is refused.
  std::vector<std::string> bad_words;
  // A TensorRT-LLM end_id takes the place of the model's own end tokens.
  bool replaces_eos = false;
  int32_t pad_id = 0;
  bool skip_special_tokens = true;

  // Many responses with what is new, or one with everything.
  bool streaming = false;
  // The prompt comes before the output. Never when streaming.
  bool prepend_prompt = false;
  // The client asked for a last response without outputs when no data is left.
  bool wants_empty_final = false;
  KserveOutputs outputs;
};

// What a token that must never come gets added to its logit. Finite, so that no
// arithmetic on it makes a NaN, and below any difference of real logits.
inline constexpr float kBannedTokenBias = -1e9f;

// Every bad word is tokenized; a worker takes as many biases.
inline constexpr size_t kMaxBadWords = 1024;

// `unary`: through ModelInfer, which has one response: `streaming` is then
// false whatever the tensors say (and the prompt left out as if it were true).
//
// INVALID_ARGUMENT names tensor or parameter, want and have. UNIMPLEMENTED
// names what would change the result and is not built; its neutral values
// (beam_width 1, bad_words [""], ...) are taken.
absl::StatusOr<KserveRequest> ParseKserveRequest(
    const inference::ModelInferRequest& request, bool unary);

// The tensors that the schemas have: what ModelMetadata and ModelConfig list,
// what tells a schema, and what a client may ask for.
struct KserveTensorSpec {
  const char* name;
  const char* datatype;
  // -1: any number of elements.
  std::vector<int64_t> shape;
};
struct KserveInputSpec : KserveTensorSpec {
  // TensorRT-LLM's text schema alone has it.
  bool tells_trt_text = false;
};
struct KserveOutputSpec : KserveTensorSpec {
  bool KserveOutputs::*flag;
};
const std::vector<KserveInputSpec>& KserveInputSpecs();
const std::vector<KserveOutputSpec>& KserveOutputSpecs();

}  // namespace kvasir::router
