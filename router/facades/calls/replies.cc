#include "router/facades/calls/replies.h"

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "router/facades/calls/identity.h"
#include "router/facades/calls/metadata.h"

namespace kvasir::router {
namespace {

// One call of Abort may have this many ids; gateways send far fewer.
constexpr int kMaxAbortedIds = 1024;

}  // namespace

absl::StatusOr<Caller> AskCaller(const grpc::ServerContextBase& context,
                                 const FacadeBackend& backend) {
  const CallIdentity call = IdentityOf(context);
  Caller refused;
  absl::StatusOr<Caller> caller = IdentifyCaller(backend, call, &refused);
  if (!caller.ok()) {
    backend.router->LogRefused(
        DescribeRequest(call, refused, backend.facade, "", ""),
        caller.status());
  }
  return caller;
}

absl::Status RefuseGarbage(const grpc::ServerContextBase& context,
                           const FacadeBackend& backend) {
  KVASIR_ASSIGN_OR_RETURN(const Caller caller, AskCaller(context, backend));
  backend.router->LogRefused(
      DescribeRequest(IdentityOf(context), caller, backend.facade, "", ""),
      absl::InvalidArgumentError(
          "the bytes of the request cannot be parsed as the message type of "
          "this call"));
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* Answer(
    grpc::CallbackServerContext* context, const FacadeBackend& backend,
    absl::FunctionRef<absl::Status(const Caller&)> answer) {
  const absl::StatusOr<Caller> caller = AskCaller(*context, backend);
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(
      base::ToGrpcStatus(caller.ok() ? answer(*caller) : caller.status()));
  return reactor;
}

grpc::ServerUnaryReactor* Answer(grpc::CallbackServerContext* context,
                                 const FacadeBackend& backend,
                                 const absl::Status& status) {
  return Answer(context, backend, [&status](const Caller&) { return status; });
}

absl::Status RpcNotBuilt(const char* service, const char* rpc) {
  return absl::UnimplementedError(
      absl::StrCat(service, "/", rpc, " is not implemented"));
}

absl::Status AbortRequests(
    const Caller& caller, const FacadeBackend& backend,
    const google::protobuf::RepeatedPtrField<std::string>& request_ids) {
  if (request_ids.size() > kMaxAbortedIds) {
    return absl::InvalidArgumentError(
        absl::StrCat("request_ids: want at most ", kMaxAbortedIds,
                     " ids, have ", request_ids.size()));
  }
  // Each id is looked up only once, even if the client has repeated it.
  const absl::flat_hash_set<absl::string_view> ids(request_ids.begin(),
                                                   request_ids.end());
  for (const absl::string_view id : ids) {
    for (const auto& [weak, number] :
         backend.running_ids->Find(caller.tenant, std::string(id))) {
      if (const auto call = weak.lock()) call->OnStop(number);
    }
  }
  return absl::OkStatus();
}

}  // namespace kvasir::router
