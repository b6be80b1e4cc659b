// gRPC reactors for calls that consist of one request: one reactor for a
// stream of responses, one for a single response. Both delete themselves in
// OnDone, which gRPC calls after End has been called and all other On...
// methods have returned.
// Threads: gRPC's threads call the On... methods, and the call's strand calls
// the methods of CallWriter. These two groups of methods share only gRPC's
// own state.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <utility>

#include "base/net/grpc_status.h"
#include "router/base/client_calls.h"
#include "router/base/task_runner.h"
#include "router/facades/calls/metadata.h"
#include "router/facades/calls/single_call.h"

namespace kvasir::router {

template <typename Answer>
struct GenerateCall {
  std::shared_ptr<FacadeBackend> backend;
  size_t message_bytes = 0;
  std::shared_ptr<TaskRunner> runner;
};

// A function that reads the call's message, which gRPC keeps until
// OnDone.
template <typename Answer>
using ReadMessage = absl::AnyInvocable<typename SingleCall<Answer>::Asked()>;

template <typename Answer>
std::shared_ptr<SingleCall<Answer>> NewCall(
    GenerateCall<Answer> call, const grpc::CallbackServerContext& context,
    CallWriter<typename Answer::Response>* writer) {
  return std::make_shared<SingleCall<Answer>>(
      typename SingleCall<Answer>::Parts{
          .backend = std::move(call.backend),
          .identity = IdentityOf(context),
          .message_bytes = call.message_bytes,
          .strand = Strand::Create(std::move(call.runner)),
          .writer = writer});
}

template <typename Answer>
class GenerateStreamReactor final
    : public grpc::ServerWriteReactor<typename Answer::Response>,
      public CallWriter<typename Answer::Response> {
 public:
  GenerateStreamReactor(GenerateCall<Answer> call,
                        grpc::CallbackServerContext* context,
                        ReadMessage<Answer> read)
      : context_(context),
        open_(call.backend->calls),
        call_(NewCall(std::move(call), *context, this)) {
    call_->Begin(std::move(read));
  }

  void OnWriteDone(bool ok) override { call_->OnWritten(ok); }
  void OnCancel() override { call_->OnCancelled(); }
  void OnDone() override { delete this; }

  void Write(typename Answer::Response response) override {
    response_ = std::move(response);
    this->StartWrite(&response_);
  }
  void Reset() override { context_->TryCancel(); }
  void End(const absl::Status& status) override {
    this->Finish(base::ToGrpcStatus(status));
  }

 private:
  grpc::CallbackServerContext* const context_;
  const ClientCall open_;
  const std::shared_ptr<SingleCall<Answer>> call_;
  // Must not change between StartWrite and OnWriteDone, because gRPC reads
  // it then.
  typename Answer::Response response_;
};

template <typename Answer>
class GenerateUnaryReactor final
    : public grpc::ServerUnaryReactor,
      public CallWriter<typename Answer::Response> {
 public:
  // `response` must live until OnDone.
  GenerateUnaryReactor(GenerateCall<Answer> call,
                       grpc::CallbackServerContext* context,
                       typename Answer::Response* response,
                       ReadMessage<Answer> read)
      : response_(response),
        open_(call.backend->calls),
        call_(NewCall(std::move(call), *context, this)) {
    call_->Begin(std::move(read));
  }

  void OnCancel() override { call_->OnCancelled(); }
  void OnDone() override { delete this; }

  void Write(typename Answer::Response response) override {
    *response_ = std::move(response);
    call_->OnWritten(true);
  }
  void Reset() override {}
  void End(const absl::Status& status) override {
    Finish(base::ToGrpcStatus(status));
  }

 private:
  typename Answer::Response* const response_;
  const ClientCall open_;
  const std::shared_ptr<SingleCall<Answer>> call_;
};

}  // namespace kvasir::router
