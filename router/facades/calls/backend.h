// The state that all calls of a facade share, limits for calls, and functions
// that several facades use.
#pragma once

#include <cstdint>
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
  // The largest number of samples of one request. It is checked before memory
  // is allocated for the samples.
  uint32_t max_n = 128;
  // The operator's default of max_tokens, for requests that do not set it.
  uint32_t default_max_tokens = 256;
  // The limit, in bytes, of output that waits because the client does not read.
  // A stream is reset if more waits in total, or if more than
  // max_response_bytes wait for one request.
  size_t max_waiting_bytes_per_stream = 16 << 20;
  // The most output in a response. By default, gRPC clients refuse messages of
  // more than 4 MiB, of which 64 KiB are kept for the message's other fields.
  size_t max_response_bytes = (4 << 20) - (64 << 10);
  // How many requests of one client stream may run at the same time.
  size_t max_requests_per_stream = 1024;
  // How many requests may wait for one of the tokenizer's threads.
  size_t max_tokenizer_queue = 4096;
  int num_tokenizer_threads = 2;
  // The number of threads that turn events into responses.
  int num_stream_threads = 2;
};

// State that all calls of a facade share.
// Threads: any thread may use it, because its members are constant or
// protect themselves.
struct FacadeBackend {
  RequestRouter* router = nullptr;
  // The protocol's name in the access log and in metrics.
  std::string facade;
  // The codec of all models, because the router accepts only workers with its
  // tokenizer. Null if requests must contain token ids.
  std::shared_ptr<const TextCodec> codec;
  FacadeLimits limits;
  // The server's version, as the protocol reports it.
  std::string server_version;
  const base::Clock* clock = &base::Clock::Real();
  std::shared_ptr<TaskRunner> tokenizer;
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // If null, callers need no credentials.
  std::shared_ptr<const Callers> callers;
  // If null, the memory for requests is not limited.
  std::shared_ptr<ByteBudget> budget;
  std::shared_ptr<RunningIds> running_ids = std::make_shared<RunningIds>();
};

// Identifies the caller that made a call. If callers need no credentials, the
// caller belongs to the tenant that it names, and an invalid name gives
// INVALID_ARGUMENT. Otherwise calls Callers::Identify: returns its errors and
// sets `*refused`.
absl::StatusOr<Caller> IdentifyCaller(const FacadeBackend& backend,
                                      const CallIdentity& call,
                                      Caller* refused);

// A message's caller and its share of the router's memory. Both are determined
// when the message arrives, so that waiting messages count as well.
struct ArrivedMessage {
  // For a refused caller, this contains what is known of the caller.
  Caller caller;
  // Memory for the message and for a copy of its text or ids. Null if memory is
  // not limited. An error if the message is refused.
  absl::StatusOr<std::shared_ptr<ByteShare>> bytes;
};
ArrivedMessage Arrive(const FacadeBackend& backend, const CallIdentity& call,
                      size_t message_bytes);

// Takes a place in the tenant's quota for a request. Returns null if the tenant
// has no quota, and RESOURCE_EXHAUSTED if the quota is used up. Call it before
// any other work for the request.
absl::StatusOr<std::shared_ptr<RequestPlace>> EnterQuota(
    const FacadeBackend& backend, const Caller& caller);

// Counts all samples of a request in the tenant's quota. `place` is the
// request's place there, or null. Returns the errors of
// RequestPlace::CountSamples.
absl::Status CountSamples(const FacadeBackend& backend, RequestPlace* place,
                          uint32_t n);

// Returns INVALID_ARGUMENT if n exceeds what the model's workers or this
// router allow.
absl::Status CheckNumSamples(uint32_t n, const kvasir::v1::WorkerInfo& info,
                             const FacadeLimits& limits);

// Returns the error (UNIMPLEMENTED) for a field that needs a tokenizer if
// the model has none. `instead` tells the client how to send the request
// without this field.
absl::Status NeedsTokenizer(const std::string& field,
                            const std::string& instead);

// Returns the prompt's ids. INVALID_ARGUMENT if the text has no tokens.
// NEVER_FITS if it has at least `max_model_len` tokens; 0 means that the limit
// is unknown.
absl::StatusOr<proto::TokenBytes> EncodePrompt(const TextCodec& codec,
                                               const std::string& text,
                                               uint32_t max_model_len);

// Returns the caller's `turn` for the tokenizer (TaskRunner::PostInTurn). If
// callers are identified, it is the tenant. Otherwise it is the client's host,
// because clients could name any tenant.
std::string TokenizerTurn(const FacadeBackend& backend, const Caller& caller,
                          const std::string& peer);

// Returns the error (RESOURCE_EXHAUSTED) for a request that finds no place in
// the tokenizer's queue.
absl::Status TokenizerIsFull(const FacadeLimits& limits);

// Returns how many of the `wanted` output tokens fit after the prompt, if
// prompt and output together may have max_model_len tokens. If max_model_len is
// 0 (unknown), all fit.
uint32_t MostTokens(uint32_t wanted, uint64_t prompt_tokens,
                    uint32_t max_model_len);

// `fits` is the number of tokens that a single response can hold. If the client
// has set a larger max_tokens, returns INVALID_ARGUMENT. If the client has set
// none, sets it to the rest of the context (or to the operator's default if
// max_model_len is unknown), but at most to `fits`. `field` is the protocol's
// name of max_tokens.
absl::Status SetMaxTokens(const std::string& field, uint64_t prompt_tokens,
                          uint32_t max_model_len, uint64_t fits,
                          const FacadeLimits& limits,
                          kvasir::v1::SamplingParams* sampling);

// Returns "stop", "length" or "abort". All protocols use these words.
const char* FinishReasonText(kvasir::v1::FinishReason reason);

}  // namespace kvasir::router
