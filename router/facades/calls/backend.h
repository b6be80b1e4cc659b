// What all calls of a facade share, whatever its protocol, and the limits that
// hold for each of them.
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
  // Samples of one request: nothing is sized by `n` before this is checked.
  uint32_t max_n = 128;
  // The operator's, for requests that do not say: how large their answers can
  // get.
  uint32_t default_max_tokens = 256;
  // Streamed output that waits because the client does not read. Over it (or
  // over max_response_bytes of one answer) the stream is reset.
  size_t max_waiting_bytes_per_stream = 16 << 20;
  // Clients refuse messages of 4 MiB by default; a part is left for framing.
  size_t max_response_bytes = (4 << 20) - (64 << 10);
  // Requests that one stream of a client may have running.
  size_t max_requests_per_stream = 1024;
  // Requests whose text waits for a tokenizer thread.
  size_t max_tokenizer_queue = 4096;
  int num_tokenizer_threads = 2;
  // Threads that turn events into responses.
  int num_stream_threads = 2;
};

// By served model name, aliases included. A model that the router knows and
// this map does not takes token ids only.
using Codecs = std::map<std::string, std::shared_ptr<const TextCodec>>;

// Threads: any thread; constant but for what synchronizes itself.
struct FacadeBackend {
  // Null for a model of token ids alone.
  std::shared_ptr<const TextCodec> CodecOf(const std::string& model) const;

  RequestRouter* router = nullptr;
  // In the access log and in metrics.
  std::string facade;
  Codecs codecs;
  FacadeLimits limits;
  // What the protocol reports as the server's version.
  std::string server_version;
  const base::Clock* clock = &base::Clock::Real();
  std::shared_ptr<TaskRunner> tokenizer;
  std::shared_ptr<ClientCalls> calls = std::make_shared<ClientCalls>();
  // Null: nobody is asked who he is.
  std::shared_ptr<const Callers> callers;
  // Null: memory has no limit.
  std::shared_ptr<ByteBudget> budget;
  RunningIds running_ids;
  // Unique within the process.
  std::atomic<uint64_t> next_number{1};
};

// Who makes a call. Where nobody is asked who he is, his tenant is what he
// says: INVALID_ARGUMENT for what is no name. Otherwise the errors of
// Callers::Identify, and its `refused`.
absl::StatusOr<Caller> IdentifyCaller(const FacadeBackend& backend,
                                      const CallIdentity& call,
                                      Caller* refused);

// A message as it comes, before it waits for its turn: what waits is counted.
struct ArrivedMessage {
  // Who makes it, refused or not; empty where nobody knows him.
  Caller caller;
  // A share for the message and for its text or ids, which are copied out of
  // it; null where memory has no limit. Or why it is refused.
  absl::StatusOr<std::shared_ptr<ByteShare>> bytes;
};
ArrivedMessage Arrive(const FacadeBackend& backend, const CallIdentity& call,
                      size_t message_bytes);

// The request's place in its tenant's quota; null where there is none.
// RESOURCE_EXHAUSTED: before anything is looked up for it.
absl::StatusOr<std::shared_ptr<RequestPlace>> EnterQuota(
    const FacadeBackend& backend, const Caller& caller);

// INVALID_ARGUMENT where the model's workers, or we, serve fewer samples.
absl::Status CheckNumSamples(uint32_t n, const kvasir::v1::WorkerInfo& info,
                             const FacadeLimits& limits);

// UNIMPLEMENTED: `field` wants a tokenizer that the model has not; what to do
// `instead`.
absl::Status NeedsTokenizer(const std::string& field,
                            const std::string& instead);

// A prompt's ids, at least one.
absl::StatusOr<proto::TokenBytes> EncodePrompt(const TextCodec& codec,
                                               const std::string& text);

// RESOURCE_EXHAUSTED: a tokenizer's queue that takes no more.
absl::Status TokenizerIsFull(const FacadeLimits& limits);

// Tokens that a sample can get: `wanted` as far as the prompt leaves room in
// max_model_len (0: not known).
uint32_t MostTokens(uint32_t wanted, uint64_t prompt_tokens,
                    uint32_t max_model_len);

// Sets max_tokens where the client has not: as far as the context goes (without
// a known length the operator's default), and no more than `fits` tokens, which
// is what one response holds where there is but one. INVALID_ARGUMENT where the
// client asks for more of them; `field` is its name for the number.
absl::Status SetMaxTokens(const std::string& field, uint64_t prompt_tokens,
                          uint32_t max_model_len, uint64_t fits,
                          const FacadeLimits& limits,
                          kvasir::v1::SamplingParams* sampling);

// "stop", "length", "abort": the word that every client's protocol has.
const char* FinishReasonText(kvasir::v1::FinishReason reason);

}  // namespace kvasir::router
