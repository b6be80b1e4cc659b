// A call that consists of one request. Its answer is one response or a stream
// of responses. Each protocol provides a function that prepares the request and
// a class that builds the answer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/status_macros.h"
#include "proto/kvasir/v1/worker.pb.h"
#include "proto/token_bytes.h"
#include "router/base/canonical.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/backend.h"
#include "router/facades/calls/event_relay.h"
#include "router/facades/calls/identity.h"
#include "router/facades/calls/response_pump.h"
#include "router/facades/calls/running_ids.h"

namespace kvasir::router {

// `Answer` turns engine events into responses:
//   using Response = ...;
//   void OnTokens(const kvasir::v1::GenerateEvent::Tokens&);
//   void OnFinish(const kvasir::v1::GenerateEvent::Finish&);
//   void Stop();                 // ends every running sample as aborted
//   bool finished() const;       // every sample has ended
//   bool HasResponse() const;
//   Response Take();             // precondition: HasResponse()
//   bool complete() const;       // the last response has been taken
//   size_t waiting_bytes() const;  // output that waits for the client
template <typename Answer>
struct PreparedCall {
  proto::TokenBytes prompt;
  kvasir::v1::SamplingParams sampling;
  std::optional<uint64_t> seed;
  // Requests with lower values run first.
  int32_t priority = 0;
  // The client's own cache salt. Requests of one tenant share cached prefixes
  // only if their salts are equal.
  std::string cache_salt;
  // See CanonicalRequest.
  std::string session;
  // If true, the client gets the whole answer in one response.
  bool folded = false;
  std::unique_ptr<Answer> answer;
};

// One call. An error becomes the call's status. Nothing is written before the
// request's first tokens. So a client whose request is refused has received no
// response and may try another server.
//
// Threads: Begin and the On... methods may be called from any thread; they only
// post tasks to the strand. All other methods run on the strand.
template <typename Answer>
class SingleCall final
    : public StoppableCall,
      public std::enable_shared_from_this<SingleCall<Answer>>,
      private ResponseSource<typename Answer::Response> {
 public:
  using Response = typename Answer::Response;
  // Prepares the request. Runs on the tokenizer's threads, because it tokenizes
  // the prompt.
  using Prepare = absl::AnyInvocable<absl::StatusOr<PreparedCall<Answer>>()>;

  struct Parts {
    std::shared_ptr<FacadeBackend> backend;
    CallIdentity identity;
    size_t message_bytes = 0;
    std::shared_ptr<TaskRunner> strand;
    // Must exist until its End is called.
    CallWriter<Response>* writer = nullptr;
  };

  explicit SingleCall(Parts parts)
      : parts_(std::move(parts)),
        number_(parts_.backend->running_ids->NextNumber()),
        arrived_(
            Arrive(*parts_.backend, parts_.identity, parts_.message_bytes)),
        pump_(this, parts_.writer) {}

  // The result of reading the call's message.
  struct Asked {
    std::string model;
    // The id that the client gave the request. If empty, no other call can stop
    // the request.
    std::string id;
    // The number of samples; it is checked later. 0 counts as 1.
    uint32_t n = 1;
    // An error if the request is refused.
    absl::StatusOr<Prepare> prepare;
  };

  // Begins the call. Call this once, before any other method. `read` reads the
  // call's message, which gRPC keeps until the call ends. It runs on the
  // strand, before the call can end.
  void Begin(absl::AnyInvocable<Asked()> read) {
    Post([read = std::move(read)](SingleCall& call) mutable {
      // Check quota and memory limit first, so that a request over a limit is
      // refused before its message is read.
      if (const absl::Status status = call.Enter(); !status.ok()) {
        return call.Refuse(status);
      }
      Asked asked = read();
      call.model_ = std::move(asked.model);
      call.id_ = std::move(asked.id);
      if (const absl::Status status =
              call.HandleBegin(std::move(asked.prepare), asked.n);
          !status.ok()) {
        call.Refuse(status);
      }
    });
  }
  void OnWritten(bool ok) {
    Post([ok](SingleCall& call) { call.pump_.OnWritten(ok); });
  }
  void OnCancelled() {
    Post([](SingleCall& call) {
      call.pump_.EndCall(absl::CancelledError("cancelled by the client"),
                         CancelReason::kClient);
    });
  }
  void OnStop(uint64_t) override {
    Post([](SingleCall& call) { call.HandleStop(); });
  }

 private:
  friend class EventRelay<SingleCall>;

  void Post(absl::AnyInvocable<void(SingleCall&)> step) {
    parts_.strand->Post(
        [self = this->shared_from_this(), step = std::move(step)]() mutable {
          if (!self->pump_.ended()) step(*self);
        });
  }

  absl::Status Enter() {
    KVASIR_RETURN_IF_ERROR(arrived_.bytes.status());
    KVASIR_ASSIGN_OR_RETURN(place_,
                            EnterQuota(*parts_.backend, arrived_.caller));
    return absl::OkStatus();
  }
  // Call this when the request no longer runs. It frees the request's place in
  // the tenant's quota.
  void LeavePlace() {
    if (place_ != nullptr) place_->Leave();
  }

  CanonicalRequest Describe() const {
    return DescribeRequest(parts_.identity, arrived_.caller,
                           parts_.backend->facade, model_, id_);
  }
  void Refuse(const absl::Status& status) {
    parts_.backend->router->LogRefused(Describe(), status);
    pump_.EndCall(status, CancelReason::kClient);
  }

  absl::Status HandleBegin(absl::StatusOr<Prepare> ready, uint32_t n) {
    KVASIR_RETURN_IF_ERROR(ready.status());
    KVASIR_RETURN_IF_ERROR(CountSamples(*parts_.backend, place_.get(), n));
    if (!id_.empty()) {
      parts_.backend->running_ids->Add(arrived_.caller.tenant, id_,
                                       this->weak_from_this(), number_);
      listed_ = true;
    }
    // The task keeps the request's place in the quota until it has run
    // or is dropped, because it costs the tokenizer work even if the
    // call is cancelled.
    auto prepare = [self = this->shared_from_this(), place = place_,
                    prepare = *std::move(ready)]() mutable {
      auto prepared = prepare();
      place.reset();
      self->Post([prepared = std::move(prepared)](SingleCall& call) mutable {
        call.HandlePrepared(std::move(prepared));
      });
    };
    if (parts_.backend->tokenizer->PostInTurn(
            TokenizerTurn(*parts_.backend, arrived_.caller,
                          parts_.identity.peer),
            std::move(prepare))) {
      return absl::OkStatus();
    }
    return TokenizerIsFull(parts_.backend->limits);
  }

  void HandlePrepared(absl::StatusOr<PreparedCall<Answer>> prepared) {
    if (pump_.ending()) return;  // stopped while the tokenizer worked
    if (!prepared.ok()) return Refuse(prepared.status());
    if (const absl::Status status =
            CheckPriority(arrived_.caller, prepared->priority);
        !status.ok()) {
      return Refuse(status);
    }
    num_samples_ = prepared->sampling.n();
    answer_ = std::move(prepared->answer);
    CanonicalRequest request = Describe();
    request.cache_salt =
        CacheSaltOf(arrived_.caller.cache_tenant(), prepared->cache_salt);
    request.session = std::move(prepared->session);
    request.priority = prepared->priority;
    request.prompt = std::move(prepared->prompt);
    request.sampling = std::move(prepared->sampling);
    request.seed = prepared->seed;
    request.folded = prepared->folded;
    request.bytes = *arrived_.bytes;
    if (request.bytes != nullptr) {
      request.bytes->Grow(request.prompt.bytes().size());
    }
    auto handle = parts_.backend->router->Submit(
        std::move(request), std::make_shared<EventRelay<SingleCall>>(
                                this->shared_from_this(), number_, place_));
    if (!handle.ok()) {
      // Free the place now. Otherwise the relay would keep it until the router
      // drops the relay, a little later.
      LeavePlace();
      return pump_.EndCall(handle.status(), CancelReason::kClient);
    }
    handle_ = *std::move(handle);
  }

  void HandleTokens(uint64_t, const kvasir::v1::GenerateEvent::Tokens& tokens) {
    if (pump_.ending()) return;
    answer_->OnTokens(tokens);
    // If stop strings have ended all samples, the answer needs no more tokens.
    if (answer_->finished()) {
      CancelEngine(CancelReason::kStopString);
      LeavePlace();
    }
    Changed();
  }
  void HandleFinish(uint64_t, const kvasir::v1::GenerateEvent::Finish& finish) {
    if (pump_.ending()) return;
    ++num_engine_finishes_;
    answer_->OnFinish(finish);
    // Free the place now, because the client may send its next request as soon
    // as it has received the end of this one.
    if (answer_->finished()) LeavePlace();
    Changed();
  }
  void HandleDone(uint64_t, const absl::Status& status) {
    if (pump_.ending() || answer_->finished()) return;
    pump_.EndCall(
        !status.ok()
            ? status
            : absl::InternalError(
                  "the request ended before all its samples were finished"),
        CancelReason::kClient);
  }
  void HandleStop() {
    if (pump_.ending()) return;
    if (answer_ == nullptr) {
      pump_.EndCall(absl::CancelledError("aborted by the client"),
                    CancelReason::kClient);
      return;
    }
    answer_->Stop();
    CancelEngine(CancelReason::kClient);
    Changed();
  }

  void CancelEngine(CancelReason reason) {
    const bool engine_works = num_engine_finishes_ < num_samples_;
    if (handle_ != nullptr && engine_works) handle_->Cancel(reason);
  }
  void Changed() {
    pump_.PumpSoon();
    // All waiting output goes into one response, so the limit of a response
    // applies too.
    const size_t waiting = CountWaiting();
    pump_.CheckWaiting(waiting, parts_.backend->limits.max_response_bytes);
    pump_.CheckWaiting(waiting,
                       parts_.backend->limits.max_waiting_bytes_per_stream);
  }
  size_t CountWaiting() {
    const size_t waiting = answer_->waiting_bytes();
    if (const auto& bytes = *arrived_.bytes; bytes != nullptr) {
      bytes->Grow(waiting);
      bytes->Shrink(waiting_bytes_);
    }
    waiting_bytes_ = waiting;
    return waiting;
  }
  void Unlist() {
    if (!std::exchange(listed_, false)) return;
    parts_.backend->running_ids->Remove(arrived_.caller.tenant, id_, number_);
  }

  std::optional<Response> NextResponse() override {
    if (answer_ == nullptr || !answer_->HasResponse()) return std::nullopt;
    Response response = answer_->Take();
    CountWaiting();
    return response;
  }
  std::optional<absl::Status> EndOfCall() override {
    if (answer_ == nullptr || !answer_->complete()) return std::nullopt;
    Unlist();
    handle_.reset();
    return absl::OkStatus();
  }
  void GiveUp(CancelReason reason) override {
    Unlist();
    CancelEngine(reason);
    // This does not free the place in the quota. The relay holds it until the
    // engine ends the request, or the tokenizer's task until it has run.
    place_.reset();
    // Break a cycle of references (request, relay, this call, handle, request),
    // which would last until the request ends.
    handle_.reset();
  }
  void PostPumpTurn() override {
    Post([](SingleCall& call) { call.pump_.OnPumpTurn(); });
  }

  const Parts parts_;
  const uint64_t number_;
  const ArrivedMessage arrived_;

  // The members below are used only on the strand.
  ResponsePump<Response> pump_;
  std::string model_;
  std::string id_;
  bool listed_ = false;
  // The request's place in its tenant's quota; null if it has none.
  std::shared_ptr<RequestPlace> place_;
  // Null until the prompt is tokenized.
  std::unique_ptr<Answer> answer_;
  // Null until the request is submitted.
  std::shared_ptr<RequestHandle> handle_;
  uint32_t num_samples_ = 0;
  uint32_t num_engine_finishes_ = 0;
  size_t waiting_bytes_ = 0;  // the last counted answer_->waiting_bytes()
};

}  // namespace kvasir::router
