// State that all calls of a facade share, and the limits of each call.
#pragma once

#include <atomic>
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
  // Samples of one request. Nothing is allocated by `n` before this is checked.
  uint32_t max_n = 128;
  // The operator's default for requests that set none; it bounds the size of
  // their answers.
  uint32_t default_max_tokens = 256;
  // Streamed output that waits because the client does not read. Above it (or
  // above max_response_bytes of one answer) the stream is reset.
  size_t max_waiting_bytes_per_stream = 16 << 20;
  // Clients refuse messages of more than 4 MiB by default. The rest is left for
  // framing.
  size_t max_response_bytes = (4 << 20) - (64 << 10);
  // Requests that one stream of a client may have running.
  size_t max_requests_per_stream = 1024;
  // Requests that wait for a tokenizer thread.
  size_t max_tokenizer_queue = 4096;
  int num_tokenizer_threads = 2;
  // Threads that turn events into responses.
  int num_stream_threads = 2;
};

// By served model name, aliases included. Models that are not in this map
// accept only token ids.
using Codecs = std::map<std::string, std::shared_ptr<const TextCodec>>;

// Threads: any thread; constant except for members that synchronize themselves.
struct FacadeBackend {
  // Null for a model that accepts only token ids.
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
  // Null: callers are not asked for credentials.
  std::shared_ptr<const Callers> callers;
  // Null: memory has no limit.
  std::shared_ptr<ByteBudget> budget;
  RunningIds running_ids;
  // Unique within the process.
  std::atomic<uint64_t> next_number{1};
};

// Identifies the maker of a call. If callers are not asked for credentials, the
// tenant is the one that the client names; INVALID_ARGUMENT if that is not a
// name. Otherwise returns the errors of Callers::Identify, and its `refused`.
absl::StatusOr<Caller> IdentifyCaller(const FacadeBackend& backend,
                                      const CallIdentity& call,
                                      Caller* refused);

// A message when it arrives. Its bytes are counted before it waits for its
// turn.
struct ArrivedMessage {
  // Set for refused callers as well, as far as they are known.
  Caller caller;
  // A share for the message and for its text or ids, which are copied out of
  // it; null if memory has no limit. Or the reason why it is refused.
  absl::StatusOr<std::shared_ptr<ByteShare>> bytes;
};
ArrivedMessage Arrive(const FacadeBackend& backend, const CallIdentity& call,
                      size_t message_bytes);

// The request's place in its tenant's quota; null if it has none.
// RESOURCE_EXHAUSTED, before anything is looked up for the request.
absl::StatusOr<std::shared_ptr<RequestPlace>> EnterQuota(
    const FacadeBackend& backend, const Caller& caller);

// INVALID_ARGUMENT if the model's workers or this router serve fewer samples.
absl::Status CheckNumSamples(uint32_t n, const kvasir::v1::WorkerInfo& info,
                             const FacadeLimits& limits);

// UNIMPLEMENTED: `field` needs a tokenizer that the model does not have;
// `instead` says what to do.
absl::Status NeedsTokenizer(const std::string& field,
                            const std::string& instead);

// Returns the prompt's ids. INVALID_ARGUMENT if there are none.
absl::StatusOr<proto::TokenBytes> EncodePrompt(const TextCodec& codec,
                                               const std::string& text);

// RESOURCE_EXHAUSTED: the tokenizer's queue is full.
absl::Status TokenizerIsFull(const FacadeLimits& limits);

// Returns how many of the `wanted` tokens the prompt leaves room for in
// max_model_len (0: unknown).
uint32_t MostTokens(uint32_t wanted, uint64_t prompt_tokens,
                    uint32_t max_model_len);

// Sets max_tokens if the client has not: as many as the context allows (the
// operator's default if the length is unknown), and at most `fits`, the number
// of tokens that one response holds for answers in one response.
// INVALID_ARGUMENT if the client asks for more than `fits`; `field` is the
// client's name of the number.
absl::Status SetMaxTokens(const std::string& field, uint64_t prompt_tokens,
                          uint32_t max_model_len, uint64_t fits,
                          const FacadeLimits& limits,
                          kvasir::v1::SamplingParams* sampling);

// "stop", "length", "abort": the words of all these protocols.
const char* FinishReasonText(kvasir::v1::FinishReason reason);

}  // namespace kvasir::router
