// The logic of one call of ModelStreamInfer: it decides which requests run,
// what is written and how the call ends. A call of ModelInfer is handled as a
// stream of one request. Uses no gRPC.
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

// The interface to the transport of a call: a CallWriter that can also read.
class KserveStreamSink
    : public CallWriter<inference::ModelStreamInferResponse> {
 public:
  // Reads the next request. The transport then calls OnRead, OnHalfClose
  // or OnCancelled.
  virtual void Read() = 0;
};

struct KserveCall : CallIdentity {
  // True for ModelInfer: the request gets a single response, and an error ends
  // the call.
  bool unary = false;
  // True if the client has sent the header triton_grpc_error, so an error of a
  // request ends the call and becomes its status.
  bool errors_end_call = false;
};

// One call. Its requests run concurrently and are identified by their ids. A
// request with the id of a running request is refused (ALREADY_EXISTS), unless
// the id is empty. A `stop` request ends the running request with the same id,
// which then gets its last response. The answer to the stop request itself is a
// response without outputs.
//
// After the client's half-close, running requests are answered, and then the
// call ends with OK. If the call is reset or its deadline passes, its requests
// are cancelled.
//
// If too many bytes of streamed answers wait for the client, the requests are
// cancelled and the call is reset. Answers that consist of one response do not
// count, because they do not wait for the client.
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
  // Call this when the server drains. The call then refuses new requests, and
  // ends with UNAVAILABLE as soon as no request runs.
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
    // The request's place in its tenant's quota; null if the tenant has no
    // quota. The tokenizer's task also holds it until the task has run, and
    // then the relay until the engine ends the request.
    std::shared_ptr<RequestPlace> place;
    // The time from the request's arrival to its submission to the router.
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
  // Call this after an answer has changed. Counts the waiting output again, and
  // makes the pump write.
  void Changed(Requests::iterator it);
  // Removes a request, and cancels it if the engine still works on it.
  void Remove(Requests::iterator it, CancelReason reason);
  // Frees the request's place in the tenant's quota. Call it when the request
  // no longer runs.
  static void LeavePlace(const Request& entry);
  void Record(const Request& request, bool ok);
  // Counts the bytes of the request's streamed output that wait for the client.
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
  // Responses that belong to no running request: errors, and answers to
  // stop requests.
  std::deque<inference::ModelStreamInferResponse> direct_;
  size_t direct_bytes_ = 0;
  size_t answer_bytes_ = 0;
  bool half_closed_ = false;
  bool draining_ = false;
};

}  // namespace kvasir::router
