// Functions for calls that start no request: immediate answers, errors
// and aborts.
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

// Identifies the caller of a call. If the caller is refused, logs and counts
// the refusal.
absl::StatusOr<Caller> AskCaller(const grpc::ServerContextBase& context,
                                 const FacadeBackend& backend);

// Implements Facade::RefuseGarbage.
absl::Status RefuseGarbage(const grpc::ServerContextBase& context,
                           const FacadeBackend& backend);

// Ends the call with the status that `answer` returns. If the caller is
// refused, does not call `answer` and ends the call with the refusal.
grpc::ServerUnaryReactor* Answer(
    grpc::CallbackServerContext* context, const FacadeBackend& backend,
    absl::FunctionRef<absl::Status(const Caller&)> answer);
// Ends the call with `status`, or with the caller's error if the caller
// is refused.
grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                 const FacadeBackend& backend,
                                 const absl::Status& status);

// Returns UNIMPLEMENTED; the text contains the RPC's name.
absl::Status RpcNotBuilt(const char* service, const char* rpc);

// Defines the method of a unary RPC that always answers RpcNotBuilt. Use it in
// the class of a gRPC callback service that has a member `backend_`. `Service`
// is the generated class.
#define KVASIR_RPC_NOT_BUILT(Service, rpc, Request, Response)         \
  grpc::ServerUnaryReactor* rpc(grpc::CallbackServerContext* context, \
                                const Request*, Response*) override { \
    return Answer(context, *backend_,                                 \
                  RpcNotBuilt(Service::service_full_name(), #rpc));   \
  }

// The reactor of a server stream that ends at once with an error.
template <typename Response>
class EndedStream final : public grpc::ServerWriteReactor<Response> {
 public:
  explicit EndedStream(const absl::Status& status) {
    this->Finish(base::ToGrpcStatus(status));
  }
  void OnDone() override { delete this; }
};

// Ends those running requests of the caller's tenant that have one of these
// ids. An id without a running request is not an error: gateways abort every
// request whose client has disconnected, even if it has just ended.
absl::Status AbortRequests(
    const Caller& caller, const FacadeBackend& backend,
    const google::protobuf::RepeatedPtrField<std::string>& request_ids);

}  // namespace kvasir::router
