// The state that all calls of a facade share, the limits of each call, and
// functions that calls of several protocols use.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"
#include "router/base/canonical.h"
#include "router/base/client_calls.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/identity.h"
#include "router/facades/calls/running_ids.h"
#include "router/facades/text/text_codec.h"

namespace kvasir::router {

struct FacadeLimits {
  // The largest number of samples of a request. It is checked before any memory
  // is allocated for samples.
  uint32_t max_n = 128;
  // The operator's default of max_tokens, for requests that do not set it. It
  // limits the size of their answers.
  uint32_t default_max_tokens = 256;
  // The limit, in bytes, of streamed output that waits because the client does
  // not read. The stream is reset if more waits, or if more than
  // max_response_bytes of one answer wait.
  size_t max_waiting_bytes_per_stream = 16 << 20;
  // The largest size of a response. gRPC clients refuse messages of more than 4
  // MiB by default; 64 KiB of these are left for the message's other fields.
  size_t max_response_bytes = (4 << 20) - (64 << 10);
  // How many requests of one client stream may run at the same time.
  size_t max_requests_per_stream = 1024;
  // How many requests may wait for one of the tokenizer's threads.
  size_t max_tokenizer_queue = 4096;
  int num_tokenizer_threads = 2;
  // The number of threads that turn events into responses.
  int num_stream_threads = 2;
};

// The text codecs, by served model name (including aliases). Models that are
// not in this map accept only token ids.
using Codecs = std::map<std::string, std::shared_ptr<const TextCodec>>;

// State that all calls of a facade share.
// Threads: any thread may use it: each member is either constant or may be used
// by several threads at once.
struct FacadeBackend {
  // Returns null for a model that accepts only token ids.
  std::shared_ptr<const TextCodec> CodecOf(const std::string& model) const;

  RequestRouter* router = nullptr;
  // The protocol's name in the access log and in metrics.
  std::string facade;
  Codecs codecs;
  FacadeLimits limits;
  // The server's version, as the protocol reports it.
  std::string server_version;
  const base::Clock* clock = &base::Clock::Real();
  std::shared_ptr<TaskRunner> tokenizer;
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // Null: callers need no credentials.
  std::shared_ptr<const Callers> callers;
  // Null: the memory for requests is not limited.
  std::shared_ptr<ByteBudget> budget;
  std::shared_ptr<RunningIds> running_ids = std::make_shared<RunningIds>();
};

// Identifies the caller that made a call. If callers need no credentials, the
// caller belongs to the tenant that it names; INVALID_ARGUMENT if that is not a
// valid name. Otherwise does the same as Callers::Identify: returns its errors
// and sets `*refused`.
absl::StatusOr<Caller> IdentifyCaller(const FacadeBackend& backend,
                                      const CallIdentity& call,
                                      Caller* refused);

// The caller of a message and its share of memory. Both are determined when the
// message arrives, so that messages which wait for their turn are counted as
// well.
struct ArrivedMessage {
  // This is also set for a refused caller, as far as the caller is known.
  Caller caller;
  // The share of memory for the message and for its text or ids, which are
  // copied from the message; null if memory is not limited. An error if the
  // message is refused.
  absl::StatusOr<std::shared_ptr<ByteShare>> bytes;
};
ArrivedMessage Arrive(const FacadeBackend& backend, const CallIdentity& call,
                      size_t message_bytes);

// Takes a place in the tenant's quota for a request; null if the tenant has no
// quota. Returns RESOURCE_EXHAUSTED if the quota is used up. Call it before any
// other work is done for the request.
absl::StatusOr<std::shared_ptr<RequestPlace>> EnterQuota(
    const FacadeBackend& backend, const Caller& caller);

// Counts all samples of a request in the tenant's quota. `place` is the
// request's place there, or null. Returns the errors of
// RequestPlace::CountSamples.
absl::Status CountSamples(const FacadeBackend& backend, RequestPlace* place,
                          uint32_t n);

// Returns INVALID_ARGUMENT if n exceeds what the model's workers or this router
// allow.
absl::Status CheckNumSamples(uint32_t n, const kvasir::v1::WorkerInfo& info,
                             const FacadeLimits& limits);

// Returns UNIMPLEMENTED: `field` needs a tokenizer, and there is none for the
// model. `instead` says how to send the request without a tokenizer.
absl::Status NeedsTokenizer(const std::string& field,
                            const std::string& instead);

// Returns the prompt's ids. INVALID_ARGUMENT if the text has no tokens.
// NEVER_FITS if it has at least `max_model_len` tokens; 0 means that the limit
// is unknown.
absl::StatusOr<proto::TokenBytes> EncodePrompt(const TextCodec& codec,
                                               const std::string& text,
                                               uint32_t max_model_len);

// Returns the name of the caller's turn at the tokenizer
// (TaskRunner::PostInTurn). It is the tenant if callers are identified.
// Otherwise clients may name any tenant, so it is the client's host.
std::string TokenizerTurn(const FacadeBackend& backend, const Caller& caller,
                          const std::string& peer);

// Returns RESOURCE_EXHAUSTED: the tokenizer's queue is full.
absl::Status TokenizerIsFull(const FacadeLimits& limits);

// Returns how many of the `wanted` output tokens fit after the prompt, if
// prompt and output together may have max_model_len tokens. If max_model_len is
// 0 (unknown), all fit.
uint32_t MostTokens(uint32_t wanted, uint64_t prompt_tokens,
                    uint32_t max_model_len);

// If the client has not set max_tokens, sets it to the rest of the context, or
// to the operator's default if max_model_len is unknown, but at most to `fits`,
// the number of tokens that a single response can hold. Returns
// INVALID_ARGUMENT if the client asks for more. `field` is the protocol's name
// of max_tokens.
absl::Status SetMaxTokens(const std::string& field, uint64_t prompt_tokens,
                          uint32_t max_model_len, uint64_t fits,
                          const FacadeLimits& limits,
                          kvasir::v1::SamplingParams* sampling);

// Returns "stop", "length" or "abort". All protocols use these words.
const char* FinishReasonText(kvasir::v1::FinishReason reason);

}  // namespace kvasir::router
