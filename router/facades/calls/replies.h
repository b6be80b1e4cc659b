// Calls that need no request of the engine's: an answer at once, an end, an
// abort.
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

// Who calls, whatever is called; a refusal has been logged and counted.
absl::StatusOr<Caller> AskCaller(const grpc::ServerContextBase& context,
                                 const FacadeBackend& backend);

// Bytes that are no message, where gRPC asks nobody else: logged and counted as
// refused. Why the caller himself is; OK: it is the bytes alone.
absl::Status RefuseGarbage(const grpc::ServerContextBase& context,
                           const FacadeBackend& backend);

// The end of a call by the status of `answer`, which is not asked where who
// calls is refused.
grpc::ServerUnaryReactor* Answer(
    grpc::CallbackServerContext* context, const FacadeBackend& backend,
    absl::FunctionRef<absl::Status(const Caller&)> answer);
// The same of a call that has but a status to give.
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

// A stream that has nothing to say.
template <typename Response>
class EndedStream final : public grpc::ServerWriteReactor<Response> {
 public:
  explicit EndedStream(const absl::Status& status) {
    this->Finish(base::ToGrpcStatus(status));
  }
  void OnDone() override { delete this; }
};

// Ends the requests of these ids that are the caller's tenant's. Ids that
// nothing runs under are no error: a gateway aborts whatever its client leaves,
// also what has just ended.
absl::Status AbortRequests(
    const Caller& caller, const FacadeBackend& backend,
    const google::protobuf::RepeatedPtrField<std::string>& request_ids);

}  // namespace kvasir::router
