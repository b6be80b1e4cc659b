// One call of ModelStreamInfer (or ModelInfer, as a stream of one request):
// which requests run, what is to be written, how the call ends. No gRPC.
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
#include "router/canonical.h"
#include "router/core/task_runner.h"
#include "router/facades/kserve/backend.h"
#include "router/facades/kserve/prepare.h"
#include "router/facades/kserve/request.h"

namespace kvasir::router {

// The transport's side of a call; implemented by reactors. Every method starts
// something and returns at once. After End nothing is called any more.
class KserveStreamSink {
 public:
  virtual ~KserveStreamSink() = default;
  // The next request; answered by OnRead, OnHalfClose or OnCancelled.
  virtual void Read() = 0;
  // One at a time; answered by OnWritten.
  virtual void Write(inference::ModelStreamInferResponse response) = 0;
  // Makes an outstanding write fail.
  virtual void Reset() = 0;
  // Exactly once, with no write outstanding.
  virtual void End(const absl::Status& status) = 0;
};

struct KserveCall {
  // Requests are folded to one response, and their errors end the call.
  bool unary = false;
  // The client wants errors as the call's status (header triton_grpc_error).
  bool errors_end_call = false;
  std::string peer;
  // As the client sent it (header x-tenant-id); checked with each request.
  std::string tenant;
  std::string traceparent;
  absl::Time deadline = absl::InfiniteFuture();
};

// Requests of one stream run side by side and are told apart by their ids; a
// request with the id of one that still runs is refused (ALREADY_EXISTS), an
// empty id never clashes. Half-close means that no more requests come: those
// that run are answered, then the call ends OK. A reset or deadline cancels
// them. A `stop` request ends the running request of its id, which then has its
// last response, and is itself answered by one response without outputs.
//
// While a write is outstanding tokens collect in their answers. When too many
// bytes of streamed answers wait, the requests are cancelled and the call is
// reset. Folded answers do not count: each comes at once and whole, however
// fast the client reads, and there are at most max_requests_per_stream.
//
// Threads: the On... methods may be called from any thread and only post;
//   everything else happens on the strand.
class KserveStream final : public std::enable_shared_from_this<KserveStream> {
 public:
  // `sink` lives until End.
  KserveStream(std::shared_ptr<KserveBackend> backend, KserveCall call,
               std::shared_ptr<TaskRunner> strand, KserveStreamSink* sink);

  void OnRead(std::shared_ptr<const inference::ModelInferRequest> request);
  void OnHalfClose();
  void OnWritten(bool ok);
  void OnCancelled();
  // The server ends: so does the call, with UNAVAILABLE, once no request runs;
  // none begins any more.
  void OnDrain();
  // A stop request that came in another call.
  void OnStop(uint64_t number);

 private:
  class Relay;
  struct Request {
    std::string id;
    std::string model;
    absl::Time start;
    // Null until the prompt is tokenized.
    std::unique_ptr<KserveAnswer> answer;
    // Null until it is submitted.
    std::shared_ptr<RequestHandle> handle;
    uint32_t num_samples = 0;
    uint32_t num_engine_finishes = 0;
    size_t waiting_bytes = 0;
    std::shared_ptr<ByteShare> bytes;
    absl::Duration queue;
    absl::Duration compute;
  };
  using Requests = std::map<uint64_t, Request>;

  // A share for a message and for what is taken out of it.
  absl::StatusOr<std::shared_ptr<ByteShare>> ShareOf(
      const inference::ModelInferRequest& message) const;
  // Runs `step` on the strand.
  void Post(absl::AnyInvocable<void(KserveStream&)> step);

  void HandleRead(const inference::ModelInferRequest& message,
                  absl::StatusOr<std::shared_ptr<ByteShare>> bytes);
  absl::Status Begin(const inference::ModelInferRequest& message,
                     std::shared_ptr<ByteShare> bytes);
  // Logs and counts what was refused before it was a request of this stream.
  void CountRefused(const inference::ModelInferRequest& message,
                    const absl::Status& status, absl::Time start);
  // What the access log says of a request, whether it comes to be or not.
  CanonicalRequest Describe(const std::string& model,
                            const std::string& id) const;
  absl::Status BeginGeneration(KserveRequest request,
                               std::shared_ptr<ByteShare> bytes);
  absl::Status CheckId(const KserveRequest& request) const;
  void StopById(const KserveRequest& request);
  void StopNumber(uint64_t number);
  void HandlePrepared(uint64_t number,
                      absl::StatusOr<PreparedRequest> prepared);
  absl::Status Submit(uint64_t number, PreparedRequest prepared);
  void HandleTokens(uint64_t number,
                    const kvasir::v1::GenerateEvent::Tokens& tokens);
  void HandleFinish(uint64_t number,
                    const kvasir::v1::GenerateEvent::Finish& finish);
  void HandleDone(uint64_t number, const absl::Status& status);

  // Answers that the request failed and forgets it.
  void Fail(uint64_t number, const absl::Status& status);
  void AnswerError(const std::string& model, const std::string& id,
                   const absl::Status& status);
  // Brings the books up to date after an answer has changed; writes.
  void Changed(Requests::iterator it);
  // Removes a request; the engine is told when it still works on it.
  void Remove(Requests::iterator it, CancelReason reason);
  void Record(const Request& request, bool ok);
  // Ends the call as soon as no write is outstanding.
  void EndCall(const absl::Status& status, CancelReason reason);
  // Counts what waits of an answer, against a slow reader.
  void CountWaiting(Request* entry);
  // Ends the call when too much waits for its reader.
  void CheckWaitingBytes();
  void CheckWaitingBytes(size_t waiting, size_t limit);
  void Pump();
  // Pumps after the events that have already come, so that a sample's end goes
  // with its last tokens.
  void PumpSoon();
  std::optional<inference::ModelStreamInferResponse> NextResponse();

  const std::shared_ptr<KserveBackend> backend_;
  const KserveCall call_;
  const std::shared_ptr<TaskRunner> strand_;
  KserveStreamSink* const sink_;

  // Strand only.
  Requests requests_;
  std::map<std::string, uint64_t> numbers_by_id_;
  // Requests that have a response to give, served in turn.
  std::set<uint64_t> ready_;
  uint64_t last_served_ = 0;
  // Responses that belong to no running request: errors, answers to stops.
  std::deque<inference::ModelStreamInferResponse> direct_;
  size_t direct_bytes_ = 0;
  size_t answer_bytes_ = 0;
  bool writing_ = false;
  bool pump_posted_ = false;
  bool half_closed_ = false;
  bool draining_ = false;
  bool ended_ = false;
  std::optional<absl::Status> end_status_;
};

}  // namespace kvasir::router
