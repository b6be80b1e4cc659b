#include "router/facades/kserve/reactors.h"

#include <utility>

#include "absl/strings/ascii.h"
#include "base/net/grpc_status.h"
#include "router/facades/calls/metadata.h"
#include "router/facades/calls/replies.h"

namespace kvasir::router {
namespace {

KserveCall CallOf(const grpc::CallbackServerContext& context, bool unary) {
  KserveCall call{IdentityOf(context)};
  call.unary = unary;
  call.errors_end_call =
      absl::AsciiStrToLower(MetadataOf(context, "triton_grpc_error")) == "true";
  return call;
}

}  // namespace

KserveStreamReactor::KserveStreamReactor(std::shared_ptr<KserveBackend> backend,
                                         std::shared_ptr<TaskRunner> runner,
                                         grpc::CallbackServerContext* context)
    : context_(context),
      backend_(std::move(backend)),
      call_(backend_->calls),
      stream_(std::make_shared<KserveStream>(
          backend_, CallOf(*context, /*unary=*/false),
          Strand::Create(std::move(runner)), this)) {
  // Check the caller before any request is read. It is checked again with
  // each request.
  if (backend_->callers != nullptr) {
    const auto caller = AskCaller(*context, *backend_);
    if (!caller.ok()) {
      stream_->OnRefused(caller.status());
      return;
    }
  }
  StartRead(&request_);
  backend_->streams.Add(stream_);
}

void KserveStreamReactor::OnReadDone(bool ok) {
  if (ok) {
    stream_->OnRead(std::make_shared<const inference::ModelInferRequest>(
        std::move(request_)));
    return;
  }
  // The client has reset the call or half-closed it, so it sends no
  // more requests.
  if (context_->IsCancelled()) {
    stream_->OnCancelled();
  } else {
    stream_->OnHalfClose();
  }
}

void KserveStreamReactor::OnWriteDone(bool ok) { stream_->OnWritten(ok); }

void KserveStreamReactor::OnCancel() { stream_->OnCancelled(); }

void KserveStreamReactor::OnDone() {
  backend_->streams.Remove(stream_.get());
  delete this;
}

void KserveStreamReactor::Read() { StartRead(&request_); }

void KserveStreamReactor::Write(inference::ModelStreamInferResponse response) {
  response_ = std::move(response);
  StartWrite(&response_);
}

void KserveStreamReactor::Reset() { context_->TryCancel(); }

void KserveStreamReactor::End(const absl::Status& status) {
  Finish(base::ToGrpcStatus(status));
}

KserveUnaryReactor::KserveUnaryReactor(
    std::shared_ptr<KserveBackend> backend, std::shared_ptr<TaskRunner> runner,
    grpc::CallbackServerContext* context,
    const inference::ModelInferRequest* request,
    inference::ModelInferResponse* response)
    : response_(response),
      call_(backend->calls),
      stream_(std::make_shared<KserveStream>(
          std::move(backend), CallOf(*context, /*unary=*/true),
          Strand::Create(std::move(runner)), this)) {
  // Do not copy the request: gRPC keeps it until the call ends, and the stream
  // reads it before it ends the call.
  stream_->OnRead(std::shared_ptr<const inference::ModelInferRequest>(
      std::shared_ptr<void>(), request));
  stream_->OnHalfClose();
}

void KserveUnaryReactor::OnCancel() { stream_->OnCancelled(); }

void KserveUnaryReactor::OnDone() { delete this; }

void KserveUnaryReactor::Write(inference::ModelStreamInferResponse response) {
  *response_ = std::move(*response.mutable_infer_response());
  stream_->OnWritten(true);
}

void KserveUnaryReactor::End(const absl::Status& status) {
  Finish(base::ToGrpcStatus(status));
}

}  // namespace kvasir::router
