// One call of ModelStreamInfer (or ModelInfer, as a stream of one request):
// which requests run, what is written, and how the call ends. No gRPC.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "router/base/canonical.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/event_relay.h"
#include "router/facades/calls/identity.h"
#include "router/facades/calls/response_pump.h"
#include "router/facades/calls/running_ids.h"
#include "router/facades/kserve/backend.h"
#include "router/facades/kserve/prepare.h"
#include "router/facades/kserve/request.h"

namespace kvasir::router {

// The transport's side of a call that also reads.
class KserveStreamSink
    : public CallWriter<inference::ModelStreamInferResponse> {
 public:
  // Reads the next request; the transport calls OnRead, OnHalfClose or
  // OnCancelled after it.
  virtual void Read() = 0;
};

struct KserveCall : CallIdentity {
  // Each request gets one response, and its error ends the call.
  bool unary = false;
  // The client wants errors as the call's status (header triton_grpc_error).
  bool errors_end_call = false;
};

// Requests of one stream run concurrently, distinguished by their ids. A
// request with the id of a running one is refused (ALREADY_EXISTS), except for
// empty ids. After a half-close, running requests are answered and the call
// ends with OK. A reset or deadline cancels them. A `stop` request ends the
// running request with its id, which then gets its last response; the stop
// itself is answered by one response without outputs.
//
// While a write is outstanding, tokens collect in their answers. If too many
// bytes of streamed answers wait, the requests are cancelled and the call is
// reset. Answers in one response do not count: each comes whole, however fast
// the client reads, and there are at most max_requests_per_stream.
//
// Threads: the On... methods may be called from any thread and only post;
//   everything else runs on the strand.
class KserveStream final
    : public StoppableCall,
      public std::enable_shared_from_this<KserveStream>,
      private ResponseSource<inference::ModelStreamInferResponse> {
 public:
  // `sink` must live until End.
  KserveStream(std::shared_ptr<KserveBackend> backend, KserveCall call,
               std::shared_ptr<TaskRunner> strand, KserveStreamSink* sink);

  void OnRead(std::shared_ptr<const inference::ModelInferRequest> request);
  void OnHalfClose();
  void OnWritten(bool ok);
  void OnCancelled();
  // The caller is refused: ends the call with `status` without reading.
  void OnRefused(const absl::Status& status);
  // The server is draining: the call ends with UNAVAILABLE once no request
  // runs, and no new one begins.
  void OnDrain();
  // A stop request that came in another call.
  void OnStop(uint64_t number) override;

 private:
  friend class EventRelay<KserveStream>;
  struct Request {
    std::string id;
    std::string model;
    Caller caller;
    absl::Time start;
    // Null until the prompt is tokenized.
    std::unique_ptr<KserveAnswer> answer;
    // Null until it is submitted.
    std::shared_ptr<RequestHandle> handle;
    uint32_t num_samples = 0;
    uint32_t num_engine_finishes = 0;
    size_t waiting_bytes = 0;
    std::shared_ptr<ByteShare> bytes;
    // The place in its tenant's quota; null: none. The request's relay holds it
    // as well and leaves it when the engine ends; before that, the tokenizer's
    // task holds it.
    std::shared_ptr<RequestPlace> place;
    // Time until the request was submitted.
    absl::Duration input;
    absl::Duration queue;
    absl::Duration compute;
  };
  using Requests = std::map<uint64_t, Request>;

  // Runs `step` on the strand.
  void Post(absl::AnyInvocable<void(KserveStream&)> step);

  void HandleRead(const inference::ModelInferRequest& message,
                  ArrivedMessage arrived);
  absl::Status Begin(const inference::ModelInferRequest& message,
                     const ArrivedMessage& arrived);
  // Logs and counts a message that was refused before it became a request of
  // this stream.
  void CountRefused(const inference::ModelInferRequest& message,
                    const Caller& caller, const absl::Status& status,
                    absl::Time start);
  CanonicalRequest Describe(const Caller& caller, const std::string& model,
                            const std::string& id) const;
  // The scope of `caller`'s requests that a stop may end.
  std::string StopScope(const Caller& caller) const;
  absl::Status BeginGeneration(KserveRequest request,
                               const ArrivedMessage& arrived,
                               std::shared_ptr<RequestPlace> place);
  // Enters the tenant's quota for a request that is to run.
  absl::StatusOr<std::shared_ptr<RequestPlace>> Enter(
      const Caller& caller) const;
  absl::Status CheckId(const KserveRequest& request) const;
  void StopById(const KserveRequest& request, const Caller& caller);
  void StopNumber(uint64_t number);
  void HandlePrepared(uint64_t number,
                      absl::StatusOr<PreparedRequest> prepared);
  absl::Status Submit(uint64_t number, PreparedRequest prepared);
  void HandleTokens(uint64_t number,
                    const kvasir::v1::GenerateEvent::Tokens& tokens);
  void HandleFinish(uint64_t number,
                    const kvasir::v1::GenerateEvent::Finish& finish);
  void HandleDone(uint64_t number, const absl::Status& status);

  // Answers that the request failed, and removes it.
  void Fail(uint64_t number, const absl::Status& status);
  void AnswerError(const std::string& model, const std::string& id,
                   const absl::Status& status);
  // Updates the state after an answer has changed, and writes.
  void Changed(Requests::iterator it);
  // Removes a request, and cancels it if the engine still works on it.
  void Remove(Requests::iterator it, CancelReason reason);
  // The request no longer runs.
  static void LeavePlace(const Request& entry);
  void Record(const Request& request, bool ok);
  // Counts an answer's waiting bytes, against a slow reader.
  void CountWaiting(Request* entry);
  // Ends the call if too many bytes wait for its reader.
  void CheckWaitingBytes();

  std::optional<inference::ModelStreamInferResponse> NextResponse() override;
  std::optional<absl::Status> EndOfCall() override;
  void GiveUp(CancelReason reason) override;
  void PostPumpTurn() override;

  const std::shared_ptr<KserveBackend> backend_;
  const KserveCall call_;
  const std::shared_ptr<TaskRunner> strand_;
  KserveStreamSink* const sink_;

  // Strand only.
  ResponsePump<inference::ModelStreamInferResponse> pump_;
  Requests requests_;
  std::map<std::string, uint64_t> numbers_by_id_;
  // Requests with a response to send, served in turn.
  std::set<uint64_t> ready_;
  uint64_t last_served_ = 0;
  // Responses that belong to no running request: errors, and answers to stops.
  std::deque<inference::ModelStreamInferResponse> direct_;
  size_t direct_bytes_ = 0;
  size_t answer_bytes_ = 0;
  bool half_closed_ = false;
  bool draining_ = false;
};

}  // namespace kvasir::router
