#include "router/facades/calls/metadata.h"

#include <grpc/grpc_security_constants.h>

#include <vector>

#include "absl/strings/str_join.h"
#include "base/net/grpc_deadline.h"

namespace kvasir::router {

std::string MetadataOf(const grpc::ServerContextBase& context,
                       const char* key) {
  std::vector<std::string> values;
  const auto [begin, end] = context.client_metadata().equal_range(key);
  for (auto it = begin; it != end; ++it) {
    values.emplace_back(it->second.data(), it->second.size());
  }
  return absl::StrJoin(values, ",");
}

Credentials CredentialsOf(const grpc::ServerContextBase& context) {
  Credentials credentials;
  const auto auth = context.auth_context();
  for (const grpc::string_ref& type :
       auth->FindPropertyValues(GRPC_TRANSPORT_SECURITY_TYPE_PROPERTY_NAME)) {
    credentials.encrypted |= type == "tls" || type == "ssl";
  }
  if (credentials.encrypted && auth->IsPeerAuthenticated()) {
    for (const char* kind :
         {GRPC_PEER_DNS_PROPERTY_NAME, GRPC_PEER_URI_PROPERTY_NAME}) {
      for (const grpc::string_ref& name : auth->FindPropertyValues(kind)) {
        credentials.certificate_names.emplace_back(name.data(), name.size());
      }
    }
  }
  ReadAuthorization(MetadataOf(context, "authorization"), &credentials);
  return credentials;
}

CallIdentity IdentityOf(const grpc::ServerContextBase& context) {
  CallIdentity call;
  call.peer = context.peer();
  call.credentials = CredentialsOf(context);
  call.tenant = MetadataOf(context, "x-tenant-id");
  call.traceparent = MetadataOf(context, "traceparent");
  call.deadline = base::FromGrpcDeadline(context.deadline());
  return call;
}

}  // namespace kvasir::router
