// Calls that start no request: immediate answers, errors and aborts.
#pragma once

#include <google/protobuf/repeated_field.h>
#include <grpcpp/grpcpp.h>

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/net/grpc_status.h"
#include "router/facades/calls/backend.h"

namespace kvasir::router {

// Identifies the caller of any call. Logs and counts a refusal.
absl::StatusOr<Caller> AskCaller(const grpc::ServerContextBase& context,
                                 const FacadeBackend& backend);

// For bytes that are not a message, which gRPC passes to no service. Logs and
// counts a refused request. Returns why the caller itself is refused, or OK if
// only the bytes are wrong.
absl::Status RefuseGarbage(const grpc::ServerContextBase& context,
                           const FacadeBackend& backend);

// Ends the call with the status of `answer`, which is not called if the caller
// is refused.
grpc::ServerUnaryReactor* Answer(
    grpc::CallbackServerContext* context, const FacadeBackend& backend,
    absl::FunctionRef<absl::Status(const Caller&)> answer);
// For a call that only returns a status.
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                 const FacadeBackend& backend,
                                 const absl::Status& status);

// UNIMPLEMENTED with the RPC's name.
absl::Status RpcNotBuilt(const char* service, const char* rpc);

// Defines a unary call of a callback service, inside its class, that answers
// RpcNotBuilt. `Service` is the generated class; the class has a `backend_`.
#define KVASIR_RPC_NOT_BUILT(Service, rpc, Request, Response)         \
  grpc::ServerUnaryReactor* rpc(grpc::CallbackServerContext* context, \
                                const Request*, Response*) override { \
    return Answer(context, *backend_,                                 \
                  RpcNotBuilt(Service::service_full_name(), #rpc));   \
  }

// A stream that ends at once.
template <typename Response>
class EndedStream final : public grpc::ServerWriteReactor<Response> {
 public:
  explicit EndedStream(const absl::Status& status) {
    this->Finish(base::ToGrpcStatus(status));
  }
  void OnDone() override { delete this; }
};

// Ends the requests with these ids that belong to the caller's tenant. Ids
// without a running request are no error: gateways abort every request whose
// client has left, including some that have just ended.
absl::Status AbortRequests(
    const Caller& caller, const FacadeBackend& backend,
    const google::protobuf::RepeatedPtrField<std::string>& request_ids);

}  // namespace kvasir::router
