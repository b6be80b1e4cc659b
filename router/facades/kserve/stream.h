// The logic of one call of ModelStreamInfer: which requests run, what is
// written, and how the call ends. A call of ModelInfer is handled as a stream
// of one request. Uses no gRPC.
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

// The transport's side of a call: a CallWriter that can also read.
class KserveStreamSink
    : public CallWriter<inference::ModelStreamInferResponse> {
 public:
  // Reads the next request. The transport then calls OnRead, OnHalfClose or
  // OnCancelled.
  virtual void Read() = 0;
};

struct KserveCall : CallIdentity {
  // True for ModelInfer: the request gets a single response, and an error ends
  // the call.
  bool unary = false;
  // True: the client wants an error as the call's status (it has sent the
  // header triton_grpc_error).
  bool errors_end_call = false;
};

// One call. Its requests run concurrently and are identified by their ids. A
// request with the id of a running request is refused (ALREADY_EXISTS), except
// for empty ids. A `stop` request ends the running request with the same id,
// which then gets its last response. The stop request itself is answered by a
// response without outputs.
//
// After a half-close, running requests are answered, and then the call ends
// with OK. If the call is reset or its deadline passes, its requests are
// cancelled.
//
// If too many bytes of streamed answers wait for the client, the requests are
// cancelled and the call is reset. Answers that are a single response do not
// count, because they wait for their end and not for the client.
//
// Threads: the On... methods may be called from any thread; they only post
// tasks to the strand. All other methods run on the strand.
class KserveStream final
    : public StoppableCall,
      public std::enable_shared_from_this<KserveStream>,
      private ResponseSource<inference::ModelStreamInferResponse> {
 public:
  // `sink` must exist until its End is called.
  KserveStream(std::shared_ptr<KserveBackend> backend, KserveCall call,
               std::shared_ptr<TaskRunner> strand, KserveStreamSink* sink);

  void OnRead(std::shared_ptr<const inference::ModelInferRequest> request);
  void OnHalfClose();
  void OnWritten(bool ok);
  void OnCancelled();
  // Call this if the caller is refused. It ends the call with `status` and
  // reads nothing.
  void OnRefused(const absl::Status& status);
  // Call this when the server drains. No new request begins from then on, and
  // the call ends with UNAVAILABLE as soon as no request runs.
  void OnDrain();
  // Ends a request of this call because of a stop request in another call.
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
    // Null until the request is submitted.
    std::shared_ptr<RequestHandle> handle;
    uint32_t num_samples = 0;
    uint32_t num_engine_finishes = 0;
    size_t waiting_bytes = 0;
    std::shared_ptr<ByteShare> bytes;
    // The request's place in its tenant's quota; null if it has none. The
    // tokenizer's task holds it until the task has run. After that the relay
    // holds it, and leaves the place when the engine ends the request.
    std::shared_ptr<RequestPlace> place;
    // The time from the request's arrival until it was submitted.
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
  // Logs and counts a message that is refused before it becomes a request of
  // this stream.
  void CountRefused(const inference::ModelInferRequest& message,
                    const Caller& caller, const absl::Status& status,
                    absl::Time start);
  CanonicalRequest Describe(const Caller& caller, const std::string& model,
                            const std::string& id) const;
  // Returns the caller's scope in RunningIds. A stop request can end only
  // requests of its own scope.
  std::string StopScope(const Caller& caller) const;
  absl::Status BeginGeneration(KserveRequest request,
                               const ArrivedMessage& arrived,
                               std::shared_ptr<RequestPlace> place);
  // Takes a place in the tenant's quota for a request.
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

  // Answers the request with an error and removes it.
  void Fail(uint64_t number, const absl::Status& status);
  void AnswerError(const std::string& model, const std::string& id,
                   const absl::Status& status);
  // Call this after an answer has changed. Updates the counts of waiting
  // output, and makes the pump write.
  void Changed(Requests::iterator it);
  // Removes a request, and cancels it if the engine still works on it.
  void Remove(Requests::iterator it, CancelReason reason);
  // Leaves the request's place in the tenant's quota, because the request no
  // longer runs.
  static void LeavePlace(const Request& entry);
  void Record(const Request& request, bool ok);
  // Updates the count of bytes that wait because the client reads slowly.
  void CountWaiting(Request* entry);
  // Ends the call if too many bytes wait because the client does not read them.
  void CheckWaitingBytes();

  std::optional<inference::ModelStreamInferResponse> NextResponse() override;
  std::optional<absl::Status> EndOfCall() override;
  void GiveUp(CancelReason reason) override;
  void PostPumpTurn() override;

  const std::shared_ptr<KserveBackend> backend_;
  const KserveCall call_;
  const std::shared_ptr<TaskRunner> strand_;
  KserveStreamSink* const sink_;

  // The members below are used only on the strand.
  ResponsePump<inference::ModelStreamInferResponse> pump_;
  Requests requests_;
  std::map<std::string, uint64_t> numbers_by_id_;
  // The requests that have a response to send. They take turns.
  std::set<uint64_t> ready_;
  uint64_t last_served_ = 0;
  // Responses that belong to no running request: errors, and answers to stop
  // requests.
  std::deque<inference::ModelStreamInferResponse> direct_;
  size_t direct_bytes_ = 0;
  size_t answer_bytes_ = 0;
  bool half_closed_ = false;
  bool draining_ = false;
};

}  // namespace kvasir::router
